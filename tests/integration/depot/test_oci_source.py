"""`oci:` against a real registry (distribution, `make cluster-tools`), pushed to by ORAS' own client."""

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from harness.oci_registry import PASSWORD, USER, OciRegistry, oci_registry
from harness.waiting import PATIENCE_S
from tests.unit.artifacts.making import write_adapter
from tests.unit.depot.reading import Asked, asked, everything, folder_bytes, read_all, refusal, remote_source
from weft.artifacts.errors import Reason, Unavailable
from weft_depot.credentials import Secret
from weft_depot.sources import ArtifactSource
from weft_devcluster.errors import ToolMissing

BIG = bytes(range(256)) * 4096 * 3  # 3 MiB: four ranges
OWNER = Secret("team/registry", {"username": USER.encode(), "password": PASSWORD.encode()})


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciRegistry]:
    try:
        with oci_registry(tmp_path_factory.mktemp("registry")) as started:
            yield started
    except ToolMissing as error:
        pytest.skip(str(error))


def source(registry: OciRegistry) -> ArtifactSource:
    hosts = ",".join(f"http://{host}" for host in (registry.open, registry.basic, registry.token))
    return remote_source("oci", f"--oci-registries={hosts}")


def at(host: str, path: str, secret: Secret | None = None) -> Asked:
    return asked(f"oci://{host}/{path}", secret)


def docker_config(host: str) -> Secret:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    return Secret("team/docker", {".dockerconfigjson": json.dumps({"auths": {host: {"auth": auth}}}).encode()})


def test_what_oras_pushed_is_read_by_tag_and_by_digest(registry: OciRegistry, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(BIG)
    first = registry.push("acme/upper", "v1", *sorted(folder.iterdir()))
    assert read_all(source(registry), at(registry.open, "acme/upper:v1")) == folder_bytes(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    second = registry.push("acme/upper", "v1", *sorted(folder.iterdir()))
    assert read_all(source(registry), at(registry.open, "acme/upper:v1"))["adapter_model.safetensors"] == b"other"
    assert read_all(source(registry), at(registry.open, f"acme/upper@{first}"))["adapter_model.safetensors"] == BIG
    signatures = set[str | None]()
    for digest in (first, second):
        with source(registry).open(*at(registry.open, f"acme/upper:any@{digest}"), everything) as snapshot:
            signatures.add(snapshot.signature)
    assert signatures == {first, second}


@pytest.mark.parametrize("server", ["basic", "token"])
def test_a_private_repository_is_read_with_the_secret_alone(registry: OciRegistry, tmp_path: Path, server: str) -> None:
    folder, host = write_adapter(tmp_path / "a"), getattr(registry, server)
    registry.push("private/lora", "v1", *sorted(folder.iterdir()))
    for secret in (OWNER, docker_config(host)):
        assert read_all(source(registry), at(host, "private/lora:v1", secret)) == folder_bytes(folder)
    wrong = Secret("team/registry", {"username": b"puller", "password": b"wrong"})
    for secret, remedy in ((None, "then name a Secret"), (wrong, "credentials with the right to pull")):
        error = refusal(source(registry), at(host, "private/lora:v1", secret))
        assert error.reason == Reason.SOURCE_FORBIDDEN
        assert remedy in error.message
        assert PASSWORD not in error.message
        assert "wrong" not in error.message


def test_a_public_repository_of_a_registry_with_tokens_needs_no_secret(registry: OciRegistry, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    registry.push("public/lora", "v1", *sorted(folder.iterdir()))
    assert read_all(source(registry), at(registry.token, "public/lora:v1")) == folder_bytes(folder)
    assert set(registry.tokens) >= {"repository:public/lora:pull"}


@pytest.mark.parametrize("path", ["acme/upper:no-such-tag", "nobody/nothing:v1", f"acme/upper@sha256:{'0' * 64}"])
def test_what_is_not_there_is_not_found(registry: OciRegistry, path: str) -> None:
    assert refusal(source(registry), at(registry.open, path)).reason == Reason.SOURCE_NOT_FOUND


def test_a_registry_that_no_flag_names_is_never_asked(registry: OciRegistry) -> None:
    error = refusal(remote_source("oci", "--oci-registries=ghcr.io"), at(registry.open, "acme/upper:v1"))
    assert error.reason == Reason.ENDPOINT_NOT_ALLOWED
    assert "--oci-registries" in error.message


def test_an_image_is_refused_with_the_way_to_push_files(registry: OciRegistry) -> None:
    """Layers without file names, as a container's image has them."""
    manifest_type = "application/vnd.oci.image.manifest.v1+json"
    url, layer = f"http://{registry.open}/v2/acme/image", b"a tar archive"
    layers = [_put_blob(url, content) for content in (b"{}", layer)]
    manifest = {"schemaVersion": 2, "mediaType": manifest_type, "config": layers[0], "layers": layers[1:]}
    with httpx2.Client(timeout=PATIENCE_S) as http:
        put = http.put(f"{url}/manifests/v1", content=json.dumps(manifest), headers={"content-type": manifest_type})
    assert put.status_code == 201, put.text
    error = refusal(source(registry), at(registry.open, "acme/image:v1"))
    assert error.reason == Reason.MISSING_FILE
    assert "oras push" in error.message


def test_a_registry_that_is_away_is_unavailable_and_not_refused(registry: OciRegistry, tmp_path: Path) -> None:
    del registry
    error = refusal(remote_source("oci", "--oci-registries=http://127.0.0.1:9"), at("127.0.0.1:9", "acme/upper:v1"))
    assert isinstance(error, Unavailable)
    assert error.reason == Reason.SOURCE_UNREACHABLE


def _put_blob(url: str, content: bytes) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with httpx2.Client(timeout=PATIENCE_S) as http:
        begun = http.post(f"{url}/blobs/uploads/")
        put = http.put(httpx2.URL(begun.headers["location"]).copy_merge_params({"digest": digest}), content=content)
    assert put.status_code == 201, put.text
    return {"mediaType": "application/octet-stream", "digest": digest, "size": len(content)}

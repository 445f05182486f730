"""What `oci:` URIs name, what manifests and Secrets of registries may hold."""

import json
from typing import Any

import pytest

from tests.unit.artifacts.making import refused
from tests.unit.depot.reading import everything
from weft.artifacts.errors import Reason
from weft_depot.credentials import Secret
from weft_depot.sources import TITLE, FileLayer, Reference, basic_credentials, parse_manifest, parse_reference

HEX = "ab" * 32
LAYER = {"digest": f"sha256:{HEX}", "size": 3, "annotations": {TITLE: "config.json"}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("//ghcr.io/acme/upper", Reference("ghcr.io", "acme/upper", None, None)),
        ("//ghcr.io/acme/up-per_1.x:v1.0", Reference("ghcr.io", "acme/up-per_1.x", "v1.0", None)),
        (f"//reg:5000/upper@sha256:{HEX}", Reference("reg:5000", "upper", None, f"sha256:{HEX}")),
        (f"//reg:5000/a/b/c:v1@sha256:{HEX}", Reference("reg:5000", "a/b/c", "v1", f"sha256:{HEX}")),
    ],
)
def test_a_reference_is_read(path: str, expected: Reference) -> None:
    assert parse_reference(path) == expected


@pytest.mark.parametrize(
    "path",
    [
        *("ghcr.io/acme/upper", "//ghcr.io", "//ghcr.io/", "//ghcr.io/Acme/upper", "//u:p@ghcr.io/acme/upper"),
        *(
            "//ghcr.io/acme/../upper",
            "//ghcr.io/acme//upper",
            "//ghcr.io/acme/upper:",
            "//ghcr.io/acme/upper@sha256:12",
        ),
        *("//ghcr.io/acme/upper:v1?x=1", "//ghcr.io/acme/upper#x", "//ghcr.io/acme/up per", "//ghcr.io/a\n/b", "//"),
    ],
)
def test_what_is_no_reference_is_a_bad_uri(path: str) -> None:
    with refused(Reason.BAD_URI):
        parse_reference(path)


def manifest(*layers: Any, **others: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "layers": list(layers), **others}).encode()


def test_files_are_layers_with_a_plain_name() -> None:
    others = [{**LAYER, "annotations": {TITLE: name}} for name in ("../up", "a/b.json", ".hidden", "")]
    assert parse_manifest(manifest(LAYER, *others, {}, 3), everything, "oci:x") == {"config.json": FileLayer(HEX, 3)}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"no json", Reason.CONFIG_INVALID),
        (b'{"manifests": []}', Reason.CONFIG_INVALID),
        (manifest(), Reason.MISSING_FILE),
        (manifest({**LAYER, "annotations": {}}), Reason.MISSING_FILE),
        (manifest(LAYER, LAYER), Reason.CONFIG_INVALID),
        (manifest({**LAYER, "digest": "sha512:00"}), Reason.CONFIG_INVALID),
        (manifest({**LAYER, "size": -1}), Reason.CONFIG_INVALID),
        (manifest({**LAYER, "size": True}), Reason.CONFIG_INVALID),
        (manifest(*[{}] * 10_001), Reason.TOO_LARGE),
    ],
)
def test_a_manifest_that_names_no_files_is_refused_by_its_reason(raw: bytes, reason: Reason) -> None:
    with refused(reason):
        parse_manifest(raw, everything, "oci:x")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"username": b"me"},
        {".dockerconfigjson": b"{"},
        {".dockerconfigjson": b'{"auths": []}'},
        {".dockerconfigjson": b'{"auths": {"quay.io": {"auth": "bWU6cHc="}}}'},
        {".dockerconfigjson": b'{"auths": {"ghcr.io": {"auth": "no base64!"}}}'},
    ],
)
def test_a_secret_without_credentials_of_the_registry_is_invalid(values: dict[str, bytes]) -> None:
    with refused(Reason.SECRET_INVALID):
        basic_credentials(Secret("team/registry", values), "ghcr.io")


def test_docker_hub_goes_by_the_names_that_docker_gives_it() -> None:
    config = {"auths": {"https://index.docker.io/v1/": {"username": "me", "password": "pw"}}}
    secret = Secret("team/registry", {".dockerconfigjson": json.dumps(config).encode()})
    assert basic_credentials(secret, "docker.io") == "Basic bWU6cHc="

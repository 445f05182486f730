"""`s3:` against a real S3 server (versitygw, `make cluster-tools`)."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from harness.s3_server import ROOT_KEYS, S3Server, s3_server
from harness.waiting import wait_until
from tests.unit.artifacts.making import write_adapter, write_model
from tests.unit.depot.reading import Asked, asked, everything, quick_policy, read_all, refusal, remote_source
from weft.artifacts.errors import Reason, Refused, Unavailable
from weft_depot.credentials import Secret
from weft_depot.sources import ArtifactSource
from weft_devcluster.errors import ToolMissing

BIG = bytes(range(256)) * 4096 * 3  # 3 MiB: four ranges
WEIGHTS = "adapter_model.safetensors"
OWNER = Secret("team/s3", ROOT_KEYS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    try:
        with s3_server(tmp_path_factory.mktemp("s3")) as started:
            started.bucket("private")
            started.bucket("public", public=True)
            yield started
    except ToolMissing as error:
        pytest.skip(str(error))


def source(server: S3Server, **changed: float) -> ArtifactSource:
    return remote_source("s3", f"--s3-endpoints={server.url}", policy=quick_policy(**changed))


def at(server: S3Server, path: str, secret: Secret | None = OWNER) -> Asked:
    return asked(f"s3:{path}", secret, endpoint=server.url)


def put(server: S3Server, bucket: str, files: dict[str, bytes]) -> None:
    for key, content in files.items():
        server.put(bucket, key, content)


def test_what_is_right_below_a_prefix_is_read(server: S3Server) -> None:
    files = {
        "a/config.json": b"{}",
        "a/w.safetensors": BIG,
        "a/b/deeper.json": b"",
        "ab/other.json": b"",
        "a/empty": b"",
        "a/additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "a/additional_chat_templates/a/deeper.jinja": b"",
    }
    put(server, "private", files)
    found = {"config.json": b"{}", "w.safetensors": BIG, "empty": b""}
    found["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    assert read_all(source(server), at(server, "//private/a")) == found
    assert read_all(source(server), at(server, "//private/a/")) == found, "a slash at the end is a habit"


def test_a_public_bucket_is_read_without_credentials_and_a_private_one_is_not(server: S3Server) -> None:
    for bucket in ("public", "private"):
        put(server, bucket, {"who/config.json": b"{}"})
    assert read_all(source(server), at(server, "//public/who", None)) == {"config.json": b"{}"}
    error = refusal(source(server), at(server, "//private/who", None))
    assert error.reason == Reason.SOURCE_FORBIDDEN
    assert "credentialsRef" in error.message


@pytest.mark.parametrize("keys", [{"secretAccessKey": b"wrong"}, {"accessKeyId": b"nobody"}])
def test_wrong_keys_are_forbidden_and_nothing_of_them_is_told(server: S3Server, keys: dict[str, bytes]) -> None:
    error = refusal(source(server), at(server, "//private/a", Secret("team/s3", {**ROOT_KEYS, **keys})))
    assert error.reason == Reason.SOURCE_FORBIDDEN
    for value in (*ROOT_KEYS.values(), *keys.values(), b"AWS4"):
        assert value.decode() not in str(error)
        assert value.decode() not in repr(error.__context__)


def test_no_rights_of_the_depot_itself_are_used(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, "private", {"own/config.json": b"{}"})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ROOT_KEYS["accessKeyId"].decode())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ROOT_KEYS["secretAccessKey"].decode())
    assert refusal(source(server), at(server, "//private/own", None)).reason == Reason.SOURCE_FORBIDDEN


@pytest.mark.parametrize("path", ["//none-of-these/x", "//private/nothing-here"])
def test_what_is_not_there_is_not_found(server: S3Server, path: str) -> None:
    assert refusal(source(server), at(server, path)).reason == Reason.SOURCE_NOT_FOUND


def test_an_object_that_is_replaced_while_it_is_read_is_noticed(server: S3Server) -> None:
    put(server, "private", {"live/w.safetensors": BIG})
    with source(server).open(*at(server, "//private/live"), everything) as snapshot:
        with snapshot.open("w.safetensors") as file:
            assert file.read(100) == BIG[:100]
            put(server, "private", {"live/w.safetensors": BIG[::-1]})
            with pytest.raises(Refused) as caught:
                file.read()
        assert caught.value.reason == Reason.DIGEST_MISMATCH
        assert "changed" in caught.value.message
        assert not snapshot.unchanged()


def test_any_change_beside_is_noticed_at_the_end(server: S3Server) -> None:
    put(server, "private", {"beside/a.json": b"1"})
    for change in ({"beside/a.json": b"2"}, {"beside/new.json": b""}):
        with source(server).open(*at(server, "//private/beside"), everything) as snapshot:
            assert snapshot.unchanged()
            put(server, "private", change)
            assert not snapshot.unchanged()
    with source(server).open(*at(server, "//private/beside"), everything) as snapshot:
        for key in ("a.json", "new.json"):
            server.client.delete_object(Bucket="private", Key=f"beside/{key}")
        assert not snapshot.unchanged(), "also when nothing is left"


def test_the_signature_is_of_the_contents(server: S3Server) -> None:
    def signature(prefix: str) -> str | None:
        with source(server).open(*at(server, f"//private/{prefix}"), lambda name: name.endswith(".json")) as snapshot:
            return snapshot.signature

    put(server, "private", {"sig/a.json": b"1"})
    first = signature("sig")
    put(server, "private", {"sig/README": b"not looked at"})
    assert signature("sig") == first
    put(server, "private", {"sig/a.json": b"2"})
    assert signature("sig") != first


def test_a_header_costs_kilobytes(server: S3Server) -> None:
    put(server, "private", {"big/w.safetensors": BIG})
    asked: list[str] = []
    with source(server).open(*at(server, "//private/big"), everything) as snapshot:
        client: Any = snapshot._client
        client.meta.events.register(
            "before-send.s3.GetObject", lambda request, **_: asked.append(str(request.headers["Range"]))
        )
        with snapshot.open("w.safetensors") as file:
            file.read(8)
        assert [re.sub(r"^b'|'$", "", one) for one in asked] == ["bytes=0-65535"]
        with snapshot.open("w.safetensors") as file:
            assert file.read() == BIG
    assert len(asked) == 1 + 3


def test_listings_of_many_pages_are_read_and_bounded(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, "private", {f"many/{number}.json": b"" for number in range(25)})
    monkeypatch.setattr("weft_depot.sources.s3.PAGE", 10)
    assert len(read_all(source(server), at(server, "//private/many"))) == 25
    monkeypatch.setattr("weft_depot.sources.s3.MAX_ENTRIES", 24)
    assert refusal(source(server), at(server, "//private/many")).reason == Reason.TOO_LARGE


def test_a_server_that_stands_still_is_given_up_in_time(server: S3Server) -> None:
    put(server, "private", {"still/w.safetensors": BIG})
    with patiently(lambda: source(server, read_s=0.5).open(*at(server, "//private/still"), everything)) as snapshot:
        server.process.pause()
        try:
            with snapshot.open("w.safetensors") as file, pytest.raises(Unavailable, match="broke at 0"):
                file.read()
            with pytest.raises(Unavailable, match="cannot be listed"):
                snapshot.unchanged()
        finally:
            server.process.signal(signal.SIGCONT)
    assert read_all(source(server), at(server, "//private/still"))["w.safetensors"] == BIG


@contextlib.contextmanager
def patiently(open_: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """With so little patience as the source has, a slow machine needs more than one try to list it."""
    with contextlib.ExitStack() as stack:
        opened: list[Any] = []

        def tried() -> bool:
            with contextlib.suppress(Unavailable):
                opened.append(stack.enter_context(open_()))
            return bool(opened)

        wait_until(tried, "the source is listed")
        yield opened[0]


@pytest.mark.parametrize("keys", [{}, {"accessKeyId": b"x"}, {"accessKeyId": b"x", "secretAccessKey": b" "}])
def test_a_secret_that_lacks_a_key_says_which(server: S3Server, keys: dict[str, bytes]) -> None:
    error = refusal(source(server), at(server, "//private/a", Secret("team/s3", keys)))
    assert error.reason == Reason.SECRET_INVALID
    assert "secretAccessKey" in error.message
    assert "team/s3" in error.message


def test_adapters_and_sharded_models_come_whole(server: S3Server, tmp_path: Path) -> None:
    server.put_folder("private", "llama", write_model(tmp_path / "model", shards=3))
    server.put_folder("private", "upper", write_adapter(tmp_path / "adapter"))
    for name, folder in (("llama", "model"), ("upper", "adapter")):
        found = read_all(source(server), at(server, f"//private/{name}"))
        assert found == {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

"""`https:` against a web server with TLS that serves files, as starlette does."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.staticfiles import StaticFiles

from harness.certificates import Authority
from harness.waiting import wait_until
from tests.unit.artifacts.making import write_adapter, write_model
from tests.unit.depot.reading import Asked, asked, everything, folder_bytes, quick_policy, read_all, refusal
from weft.artifacts.errors import Reason, Refused
from weft.process import listen
from weft_depot.artifact_layout import file_filter
from weft_depot.sources import HttpsSource, folder_url

BIG = bytes(range(256)) * 4096 * 3  # 3 MiB: four ranges


class Web:
    """A server of one folder. `host`: HOST:PORT."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.host = folder / "files", f"localhost:{port}"

    def source(self, *hosts: str) -> HttpsSource:
        return HttpsSource(hosts or (self.host,), quick_policy())

    def at(self, path: str) -> Asked:
        return asked(f"https://{self.host}/{path}")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder, authority = tmp_path_factory.mktemp("web"), Authority(bare=True)
    for name, pem in zip(("tls.crt", "tls.key"), authority.issue("localhost"), strict=True):
        (folder / name).write_bytes(pem)
    (folder / "ca.crt").write_bytes(authority.pem)
    (folder / "files").mkdir()
    app = Starlette()
    app.mount("/", StaticFiles(directory=folder / "files"))
    config = uvicorn.Config(
        app, log_config=None, ssl_certfile=folder / "tls.crt", ssl_keyfile=folder / "tls.key", lifespan="off"
    )
    server = uvicorn.Server(config)
    with listen("127.0.0.1:0", "--http") as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        wait_until(lambda: server.started, "the web server listens")
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SSL_CERT_FILE", str(folder / "ca.crt"))
            yield Web(folder, sock.getsockname()[1])
        server.should_exit = True
        thread.join()


def test_an_adapter_and_a_model_of_shards_are_read_by_the_names_that_they_may_have(web: Web) -> None:
    adapter = write_adapter(web.folder / "loras" / "upper")
    (adapter / "adapter_model.safetensors").write_bytes(BIG)
    (adapter / "README.md").write_text("not for the depot")
    found = read_all(web.source(), web.at("loras/upper"))
    assert found == {name: data for name, data in folder_bytes(adapter).items() if name != "README.md"}
    model = write_model(web.folder / "tiny", shards=2)
    with web.source().open(*web.at("tiny/"), file_filter("model")) as snapshot:
        assert set(snapshot.sizes) == {path.name for path in model.iterdir()} - {"README.md"}
        assert sum(name.endswith(".safetensors") for name in snapshot.sizes) == 2
        first = snapshot.signature
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with web.source().open(*web.at("tiny"), file_filter("model")) as snapshot:
        assert None not in (first, snapshot.signature)
        assert snapshot.signature != first


def test_a_folder_with_nothing_in_it_is_not_found_and_a_server_that_no_flag_names_is_never_asked(web: Web) -> None:
    assert refusal(web.source(), web.at("nothing")).reason == Reason.SOURCE_NOT_FOUND
    error = refusal(web.source("*.example.org"), web.at("loras/upper"))
    assert error.reason == Reason.ENDPOINT_NOT_ALLOWED
    assert "--https-hosts" in error.message


@pytest.mark.parametrize("host", ["evil-example.org", "example.org", "example.org.evil.net", "a.example.org:8443"])
def test_a_domain_is_every_host_below_it_and_no_other(host: str) -> None:
    source = HttpsSource(("*.example.org",), quick_policy())
    with pytest.raises(Refused) as caught, source.open(*asked(f"https://{host}/a"), everything):
        pass
    assert caught.value.reason == Reason.ENDPOINT_NOT_ALLOWED


@pytest.mark.parametrize(
    "path", ["host/a", "//", "//u:p@host/a", "//host/a?x=1", "//host/a/../b", "//host/a//b", "//host/%3Fx", "//ho st/a"]
)
def test_what_is_no_folder_is_a_bad_uri(path: str) -> None:
    with pytest.raises(Refused) as caught:
        folder_url(path)
    assert caught.value.reason == Reason.BAD_URI

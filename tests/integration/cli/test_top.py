"""`weft top`, the command, against a real Admin service and a real HTTP server."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from harness.loopback import LoopbackServer, Request
from harness.terminal import CTRL_C, Terminal
from weft_cli.main import INTERRUPTED, main

UPPER = "sha256:" + "a" * 64
PARTS = {"in_flight": 3, "held": 1, "pools": [], "models": []}


class Gateway(LoopbackServer):
    """Answers /status with `status`; hears the keys."""

    def __init__(self) -> None:
        self.code = 200
        self.status: Any = PARTS | {"pools": [{"name": "default/base", "held": 1}]}
        self.keys: list[str | None] = []
        super().__init__(self._answer)

    def _answer(self, request: Request) -> tuple[int, bytes]:
        assert request.path == "/status"
        self.keys.append(request.headers["authorization"])
        return self.code, orjson.dumps(self.status)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    server = Gateway()
    yield server
    server.close()


def look(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["top", "--interval", "0.1", *options])
    out, err = capfd.readouterr()
    return code, out, err


def test_a_pipe_gets_the_tables_once(controller: Any, gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    controller.stack["gateway"] = gateway.url
    code, out, err = look(capfd)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1 of 1 runners ready, 0.0 tokens/s, 3 requests, 1 waiting"
    assert lines[2].split() == "RUNNER POOL READY BATCH TOKENS/S FREE PAGES ADAPTERS ROLE PROMPTS ACCEPTED".split()
    assert lines[3].split() == ["01234567", "default/base", "True", "2/8", "0.0", "0/64", "1", "mixed", "0", "-"]
    assert lines[6].split() == ["default/base", "1/1", "2/8", "0.0", "0/64", "1", "0"]
    assert lines[9].split() == ["aaaaaaaaaaaa", "0", "0.0", "1"]
    assert "\x1b" not in out


def test_a_key_shows_more(controller: Any, gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    gateway.status = PARTS | {"models": [{"id": "acme/upper", "digest": UPPER}]}
    _, out, _ = look(capfd, "--once", "--url", gateway.url, "--key", "weft-k")
    assert set(gateway.keys) == {"Bearer weft-k"}
    assert "acme/upper" in out


def test_a_supervisor_elsewhere_needs_no_gateway(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = look(capfd, "--supervisor", controller.stack["supervisor"], "--data-dir", "/nonexistent")
    assert code == 0
    assert "waiting" not in out.splitlines()[0]
    assert "default/base" in out


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (500, {"error": {"message": "broken"}}, "refuses: 500: broken"),
        (200, {"ready": "ok"}, "is no gateway of weft"),
        (200, [1], "is no gateway of weft"),
    ],
)
def test_a_gateway_that_says_something_else_is_named(
    controller: Any, gateway: Gateway, capfd: pytest.CaptureFixture[str], code: int, status: Any, says: str
) -> None:
    gateway.code, gateway.status = code, status
    result = look(capfd, "--url", gateway.url)
    assert result[0] == 1
    assert says in result[2]


def test_what_is_not_there_is_told_in_a_line(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for options in (["--url", "http://127.0.0.1:1"], ["--supervisor", "127.0.0.1:1"], ["--data-dir", "/nonexistent"]):
        code, out, err = look(capfd, *options)
        assert (code, out) == (1, "")
        assert err.startswith("weft: ")
        assert "Traceback" not in err


def test_on_a_terminal_the_tables_follow_until_ctrl_c(controller: Any, gateway: Gateway) -> None:
    with Terminal("top", "--interval", "0.1", "--url", gateway.url) as terminal:
        for waiting in (1, 7, 9):
            gateway.status = PARTS | {"held": waiting}
            terminal.until(f"{waiting} waiting")
        terminal.write(CTRL_C)
        assert terminal.exit_code() == INTERRUPTED
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (CTRL_C, INTERRUPTED)])
def test_a_key_ends_it_within_an_interval_and_the_terminal_is_as_before(
    controller: Any, gateway: Gateway, key: bytes, code: int
) -> None:
    with Terminal("top", "--interval", "3600", "--url", gateway.url) as terminal:
        terminal.until("- tokens/s, 3 requests, 1 waiting")  # the first tables come at once, without a rate
        terminal.until("default/base")
        assert not terminal.takes_lines()
        terminal.write(b"x" + key)
        assert terminal.exit_code() == code
        assert terminal.takes_lines()
    assert terminal.text.count("\x1b[?1049l") == 1
    assert "Traceback" not in terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"TTY_COMPATIBLE": "0"}], ids=str)
def test_a_terminal_that_cannot_draw_anew_gets_lines(
    controller: Any, gateway: Gateway, environment: dict[str, str]
) -> None:
    with Terminal("top", "--interval", "0.1", "--url", gateway.url, environment=environment) as terminal:
        for waiting in (1, 7, 9):
            gateway.status = PARTS | {"held": waiting}
            terminal.until(f"{waiting} waiting")
            terminal.until("default/base")
        terminal.write(CTRL_C)
        assert terminal.exit_code() == INTERRUPTED
    assert "\x1b" not in terminal.text


def test_no_escape_code_of_a_gateway_reaches_the_terminal(controller: Any, gateway: Gateway) -> None:
    gateway.status = PARTS | {"held": "\x1b]0;title\x07some"}
    with Terminal("top", "--interval", "0.1", "--url", gateway.url) as terminal:
        terminal.until("\\x1b]0;title\\x07some waiting")
        terminal.write(CTRL_C)
        assert terminal.exit_code() == INTERRUPTED
    assert "\x1b]0;" not in terminal.text

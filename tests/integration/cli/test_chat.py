"""`weft chat` against a real HTTP server that streams as the gateway does."""

import io
import json
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from harness.loopback import Handler, LoopbackServer
from harness.terminal import CTRL_C, CTRL_D, Terminal
from harness.waiting import PATIENCE_S
from weft_cli.chat import INTERRUPTED, ChatSession, Model, _client
from weft_cli.main import main

END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
RAW = {  # what comes after the letters, as bytes
    "cut": b'data: {"choices": [{"ind',
    "no-json": b"data: <html>\n\n",
    "no-object": b"data: [1]\n\n",
    "no-text": b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
    "text-error": b'data: {"error": "out of luck"}\n\n',
    "odd-error": b'data: {"error": [1]}\n\n',
    "half": b'data: {"choices": [{"delta": {"content": "\\ud83d!"}}]}\n\n' + END,
}


class Gateway(LoopbackServer):
    """Answers in upper case, a letter an event. What goes wrong is the model's name."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()  # a client went away before the end
        gateway = self

        class ChatHandler(Handler):
            def answer(self) -> None:
                body = json.loads(self.body())
                gateway.bodies.append(body)
                gateway.keys.append(self.headers["authorization"])
                assert self.path == "/v1/chat/completions"
                assert self.headers["content-type"] == "application/json"
                if (status := {"locked": 401, "absent": 404, "wrong": 400, "full": 429}.get(body["model"])) is None:
                    return self._stream(body)
                return self.reply(status, json.dumps({"error": {"message": f"the model is {body['model']}"}}).encode())

            def _stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b": ping\n\n")
                self._send({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
                for letter in body["messages"][-1]["content"].upper():
                    self._send({"delta": {"content": letter}, "finish_reason": None})
                match body["model"]:
                    case raw if raw in RAW:
                        self.wfile.write(RAW[raw])
                    case "waits":
                        ready, _, _ = select.select([self.connection], [], [], PATIENCE_S)
                        assert not (ready and self.connection.recv(1)), "the client goes away and says nothing"
                        gateway.gone.set()
                    case "fails":
                        self.wfile.write(b'data: {"error": {"message": "no runner"}}\n\n')
                    case "breaks":
                        pass
                    case model:
                        self._send({"delta": {}, "finish_reason": "length" if model == "long" else "stop"})
                        self.wfile.write(b"data: [DONE]\n\n")

            def _send(self, choice: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n".encode())
                self.wfile.flush()

        super().__init__(ChatHandler)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Have no key; what is printed is for the test alone."""
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    yield
    capfd.readouterr()


def ask(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["chat", *argv])
    out, err = capfd.readouterr()
    return code, out, err


def test_one_question_prints_one_answer(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(capfd, "echo", "hello there", "--url", gateway.url) == (0, "HELLO THERE\n", "")
    assert gateway.bodies == [
        {"model": "echo", "messages": [{"role": "user", "content": "hello there"}], "stream": True}
    ]
    assert gateway.keys == [None]


def test_the_options_reach_the_gateway(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--key", "weft-k"]
    code, _, _ = ask(capfd, "echo", "hi", "--url", f"{gateway.url}/v1/", *options)
    assert code == 0
    (body,) = gateway.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0, 9)
    assert gateway.keys == ["Bearer weft-k"]


@pytest.mark.parametrize("words", [[], ["-"]], ids=["no text", "-"])
def test_a_pipe_is_the_question(
    gateway: Gateway, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüß\ndich\n".encode())))
    assert ask(capfd, "echo", *words, "--url", gateway.url)[1] == "GRÜSS\nDICH\n"
    assert gateway.bodies[0]["messages"][0]["content"] == "grüß\ndich", "echo's own line end is not asked"


@pytest.mark.parametrize(
    ("piped", "says"), [(b"", "there is nothing to ask"), (b" \n", "nothing to ask"), (b"\xff", "is not UTF-8")]
)
def test_what_is_no_question_is_told_and_not_asked(
    gateway: Gateway, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, piped: bytes, says: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
    code, out, err = ask(capfd, "echo", "--url", gateway.url)
    assert (code, out) == (2, "")
    assert says in err
    assert gateway.bodies == []


@pytest.mark.parametrize(
    ("model", "code", "out", "says"),
    [
        ("locked", 1, "", "weft: 401: the model is locked\n      give one with --key"),
        ("absent", 1, "", "weft: 404: the model is absent\n      `weft get lora -A`"),
        ("wrong", 2, "", "weft: 400: the model is wrong"),
        ("full", 1, "", "weft: 429: the model is full"),
        ("fails", 1, "HI\n", "weft: no runner"),
        ("breaks", 1, "HI\n", "broke off the answer"),
        ("long", 0, "HI\n", "--max-tokens"),
        ("cut", 1, "HI\n", "broke off the answer"),
        ("no-json", 1, "HI\n", "sent what is no event of a chat completion: '<html>'"),
        ("no-object", 1, "HI\n", "no event of a chat completion: '[1]'"),
        ("no-text", 1, "HI\n", "no event of a chat completion"),
        ("text-error", 1, "HI\n", "weft: out of luck"),
        ("odd-error", 1, "HI\n", "no event of a chat completion"),
    ],
)
def test_what_goes_wrong_is_told_in_a_line(
    gateway: Gateway, capfd: pytest.CaptureFixture[str], model: str, code: int, out: str, says: str
) -> None:
    result = ask(capfd, model, "hi", "--url", gateway.url)
    assert result[:2] == (code, out)
    assert says in result[2]
    assert "Traceback" not in result[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["echo", "gr\udcfc\udcdf"], "weft: the question is not UTF-8"),
        (["echo", "hi", "--system", "\udcff"], "weft: --system is not UTF-8"),
        (["\udcff", "hi"], "weft: MODEL is not UTF-8"),
    ],
)
def test_words_that_are_not_utf8_are_told_and_not_asked(
    gateway: Gateway, capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    code, out, err = ask(capfd, *words, "--url", gateway.url)
    assert (code, out) == (2, "")
    assert err.startswith(says)
    assert "iconv" in err
    assert gateway.bodies == []


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "no gateway answers at http://127.0.0.1:1"),
        (["--url", "127.0.0.1:1"], 2, "is no URL"),
        (["--url", "http://[::"], 2, "--url"),
        (["--url", "http://x", "--key", "ü"], 2, "--key"),
        (["--data-dir", "/nonexistent"], 1, "no weft is running in /nonexistent"),
    ],
)
def test_a_gateway_that_is_not_there_is_named(
    capfd: pytest.CaptureFixture[str], options: list[str], code: int, says: str
) -> None:
    result = ask(capfd, "m", "hi", *options)
    assert result[0] == code
    assert says in result[2]


def test_without_a_url_this_machines_stack_is_asked(
    gateway: Gateway, controller: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    controller.stack["gateway"] = gateway.url
    assert ask(capfd, "echo", "hi") == (0, "HI\n", "")


# ---------------------------------------------------------------- a conversation


class Person:
    """Types these lines; Ctrl-D (EOFError) is a line too."""

    def __init__(self, *lines: str | type[BaseException] | BaseException) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str:
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


def converse(gateway: Gateway, model: str, *lines: str | type[BaseException]) -> tuple[int, ChatSession]:
    person = Person(*lines)
    asked = Model(model, gateway.url)
    with _client(asked) as http:
        session = ChatSession(asked, http, [{"role": "system", "content": "s"}], person)
        code = session.run()
    assert person.lines == [], "the session ended before they were typed"
    return code, session


def test_a_conversation_is_kept_from_question_to_question(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    code, session = converse(gateway, "echo", "one", "  ", "two", EOFError)
    assert code == 0
    assert capfd.readouterr().out == "ONE\nTWO\n\n"
    texts = [[message["content"] for message in body["messages"]] for body in gateway.bodies]
    assert texts == [["s", "one"], ["s", "one", "ONE", "two"]], "an empty line asks nothing"
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 2]


def test_an_answer_with_half_a_character_does_not_end_the_session(gateway: Gateway) -> None:
    code, session = converse(gateway, "half", "one", "two", EOFError)
    assert code == 0
    assert [message["content"] for message in session.messages] == ["s", "one", "ONE?!", "two", "TWO?!"]


def test_a_line_that_is_not_utf8_does_not_end_the_session(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnicodeDecodeError) as undecodable:
        b"\xff".decode()
    person = Person("\udcff", undecodable.value, "one", EOFError)
    asked = Model("echo", gateway.url)
    with _client(asked) as http:
        assert ChatSession(asked, http, [], person).run() == 0
    assert [body["messages"][-1]["content"] for body in gateway.bodies] == ["one"]
    assert capfd.readouterr().err.count("is not UTF-8") == 2


def test_a_refusal_does_not_end_the_session_and_leaves_no_trace_in_it(
    gateway: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    code, session = converse(gateway, "full", "one", "two", EOFError)
    assert (code, len(session.messages)) == (0, 1)
    assert [len(body["messages"]) for body in gateway.bodies] == [2, 2]
    assert capfd.readouterr().err.count("weft: 429: the model is full") == 2


def test_on_a_terminal_ctrl_c_ends_the_answer_and_pressed_again_the_session(gateway: Gateway) -> None:
    """The whole command."""
    with Terminal("chat", "waits", "--url", gateway.url) as terminal:
        terminal.until("> ")
        terminal.write(b"ab\n")
        terminal.until("AB")
        terminal.write(CTRL_C)
        assert gateway.gone.wait(PATIENCE_S)
        terminal.until("> ")
        terminal.press(CTRL_C, until="\n")
        assert terminal.exit_code() == INTERRUPTED
        assert "Traceback" not in terminal.text


def test_on_a_terminal_ctrl_d_ends_the_session(gateway: Gateway) -> None:
    with Terminal("chat", "echo", "--url", gateway.url) as terminal:
        terminal.until("> ")
        terminal.write(b"a\x1b[Cb\n")  # an arrow key edits the line
        terminal.until("AB")
        terminal.until("> ")
        terminal.write(CTRL_D)
        assert terminal.exit_code() == 0


def test_a_terminal_gets_no_escape_code_that_a_model_wrote(gateway: Gateway) -> None:
    with Terminal("chat", "echo", "hi\x1b[2jthere", "--url", gateway.url) as terminal:
        assert terminal.exit_code() == 0
    assert "HI\\x1b[2JTHERE" in terminal.text
    assert "\x1b[2J" not in terminal.text

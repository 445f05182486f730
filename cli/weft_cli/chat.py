"""`weft chat`: one question or a conversation, streamed as it is written.

The gateway is spoken to as any OpenAI client would. Ctrl-C ends an answer and keeps what has come of it; a second one
in a row ends the session.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import httpx2

from weft_cli.errors import BadInput, CommandError
from weft_cli.gateway import gateway_client, link_errors, refusal_error
from weft_cli.output import note, say
from weft_cli.sse import BadEvent, Lines, event_of

INTERRUPTED = 130
MODELS_HINT = "`weft get lora -A` lists adapters, `weft get spool -A` base models"
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    """The address, key, model and options of a chat. `url` has no `/v1`. The gateway chooses options that are None."""

    name: str
    url: str
    key: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None

    def body(self, messages: list[Message]) -> dict[str, Any]:
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        fields = {name: value for name, value in options.items() if value is not None}
        return {"model": self.name, "messages": messages, "stream": True, **fields}


def chat(model: Model, text: str | None, system: str | None) -> int:
    """Ask once with `text` or what standard input holds; without both, talk. Returns the exit code."""
    messages = [{"role": "system", "content": system}] if system else []
    with _client(model) as http:
        if text is None and sys.stdin.isatty():
            return ChatSession(model, http, messages, _line).run()
        question = _piped() if text is None or text == "-" else text
        if not question.strip():
            raise BadInput("there is nothing to ask", "`weft chat MODEL TEXT`, or text on standard input")
        show(http, model, [*messages, {"role": "user", "content": question}], [])
        return 0


class ChatSession:
    """A conversation. `line(prompt)` gives what a person types; EOFError ends it."""

    def __init__(self, model: Model, http: httpx2.Client, messages: list[Message], line: Callable[[str], str]) -> None:
        self._model, self._http, self.messages, self._line = model, http, messages, line
        self._interrupted = False  # by the last thing that happened

    def run(self) -> int:
        note(f"{self._model.name} at {self._model.url}. Ctrl-C ends an answer, twice the session; so does Ctrl-D.")
        while True:
            try:
                text = self._line("> ")
            except EOFError:
                say("")
                return 0
            except KeyboardInterrupt:
                say("")
                if self._interrupted:
                    return INTERRUPTED
                self._interrupted = True
                note("Ctrl-C again ends the session")
                continue
            except UnicodeDecodeError as error:
                note(f"weft: the line is not UTF-8: {error}")
                continue
            if text.strip():
                self._interrupted = self._turn(text)

    def _turn(self, text: str) -> bool:
        """Send one question and show its answer. Return True after an interruption. Unanswered questions leave the
        conversation.
        """
        conversation = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            show(self._http, self._model, conversation, pieces)
        except CommandError as error:
            note(f"weft: {error.message}{f' ({error.hint})' if error.hint else ''}")
        except KeyboardInterrupt:
            return True
        finally:
            if pieces:
                reply = "".join(pieces).encode(errors="replace").decode()  # half a character could not be sent again
                self.messages = [*conversation, {"role": "assistant", "content": reply}]
        return False


def show(http: httpx2.Client, model: Model, messages: list[Message], pieces: list[str]) -> None:
    """Print one answer as it comes, and gather its pieces. Raises CommandError."""
    reply = Reply(http, model, messages)
    try:
        with contextlib.closing(reply.pieces()) as coming:
            for piece in coming:
                pieces.append(piece)
                _write(piece)
    finally:
        if pieces:
            _write("\n")
    if reply.reason == "length":
        note("weft: the answer is cut at its limit of tokens; --max-tokens sets it")


class Reply:
    """One answer. `reason` is its finish reason, at the end."""

    def __init__(self, http: httpx2.Client, model: Model, messages: list[Message]) -> None:
        self._http, self._model, self._messages = http, model, messages
        self.reason: str | None = None

    def pieces(self) -> Generator[str]:
        """Yield the text as it comes; closing it ends the answer at the gateway. Raises CommandError."""
        _check_text("MODEL", self._model.name)
        for message in self._messages:
            _check_text("--system" if message["role"] == "system" else "the question", message["content"])
        body = self._model.body(self._messages)
        with link_errors(self._model.url), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if not response.is_success:
                raise refusal_error(response.read(), response.status_code, MODELS_HINT)
            lines = Lines()
            for data in response.iter_bytes():
                for line in lines.feed(data):
                    yield from self._read(line)
        if self.reason is None:
            raise CommandError(f"the gateway at {self._model.url} broke off the answer")

    def _read(self, line: str) -> Iterator[str]:
        try:
            event = event_of(line)
        except BadEvent as error:
            raise CommandError(f"the gateway at {self._model.url} sent {error}") from error
        if event.error:
            raise CommandError(event.error)
        self.reason = event.reason or self.reason
        if event.text:
            yield event.text


def _check_text(subject: str, text: str) -> None:
    """Refuse text that was no UTF-8 on the command line: its half surrogates fit in no request."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{subject} is not UTF-8: {error.reason}", "`iconv -f latin1 -t utf-8` turns a file into it"
        ) from error


def _client(model: Model) -> httpx2.Client:
    return gateway_client(model.url, model.key)


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"standard input is not UTF-8: {error}") from error


def _line(prompt: str) -> str:
    with contextlib.suppress(ImportError):
        import_module("readline")  # lets the line be edited
    return input(prompt)


def _write(piece: str) -> None:
    """Write text unchanged for programs. For people, escape control characters."""
    if sys.stdout.isatty():
        say(piece, end="")
    else:
        sys.stdout.buffer.write(piece.encode(sys.stdout.encoding, "replace"))
        sys.stdout.flush()

"""A check: one request, and what vLLM's test of it asserts of the reply.

An expectation is an object of paths and values (`choices.0.text`; `#choices` is a length), a function of the reply, or
a function with arguments (`["refused", "seed"]`). In place of a value may stand a predicate (`{"at least": 5}`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import httpx2

from harness.quickstart import QUICKSTART

BASE = "weft-quickstart"
_CONFIG = json.loads((QUICKSTART / "model" / "config.json").read_text())
CONTEXT, HIDDEN = _CONFIG["max_position_embeddings"], _CONFIG["hidden_size"]
SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    """The server that is tested. `metrics`: the URL of its engine's metrics."""

    url: str
    metrics: str
    client: httpx2.Client

    def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> "Reply":
        url = path.replace("{metrics}", self.metrics) if path.startswith("{") else self.url + path
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        return Reply(self, path, body, self.client.request(method, url, content=content, headers=given))


@dataclass(frozen=True)
class Reply:
    """A response, and its request."""

    server: Server
    path: str
    sent: Any
    response: httpx2.Response

    @property
    def status(self) -> int:
        return self.response.status_code

    @cached_property
    def json(self) -> Any:
        return self.response.json()

    @cached_property
    def events(self) -> list[Any]:
        """The events of a stream, without `[DONE]`."""
        lines = [line.removeprefix("data: ") for line in self.response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @cached_property
    def streamed_choices(self) -> list[Any]:
        return [choice for event in self.events for choice in event["choices"]]

    def again(self, path: str | None = None, **changes: Any) -> "Reply":
        """Send the same request, changed. Raises AssertionError where it is refused."""
        reply = self.server.send("POST", path or self.path, {**self.sent, **changes})
        assert reply.status == 200, reply.response.text
        return reply

    def streamed_text(self, index: int = 0) -> str:
        """Return the streamed text of one choice."""
        parts = [choice for choice in self.streamed_choices if choice["index"] == index]
        return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)

    def streamed_calls(self) -> list[dict[str, str]]:
        """Return names and arguments; each part of a call has one delta, its name comes once and whole."""
        calls = list[dict[str, str]]()
        for choice in self.streamed_choices:
            for part in choice["delta"].get("tool_calls") or ():
                if part["index"] == len(calls):
                    assert len(part["id"]) >= 9
                    calls.append({"name": part["function"]["name"], "arguments": ""})
                else:
                    assert part["index"] == len(calls) - 1
                    assert not part["function"].get("name")
                calls[-1]["arguments"] += part["function"].get("arguments") or ""
        return calls


Expected: TypeAlias = Mapping[str, Any] | tuple[Any, ...]  # paths and values, or a function and its arguments


@dataclass(frozen=True)
class Check:
    """`test`: of vLLM, `file::test`, with what tells its requests apart. `differs`: why Weft's reply is another one."""

    test: str
    method: str
    path: str
    body: Any
    asserts: Sequence[Expected]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    differs: str = ""
    instead: Sequence[Expected] = ()

    def run(self, server: Server) -> None:
        """Send the request. Raises AssertionError: the reply is not what the list says."""
        reply = server.send(self.method, self.path, self.body, self.headers)
        if not self.differs:
            return require(reply, self.asserts)
        require(reply, self.instead)
        try:
            require(reply, self.asserts)
        except (AssertionError, LookupError, TypeError, ValueError):
            return None
        raise AssertionError(f"{self.test} behaves as in vLLM by now: list it so")


def require(reply: Reply, expected: Sequence[Expected]) -> None:
    """Check a reply. Raises AssertionError."""
    for expectation in expected:
        if isinstance(expectation, tuple):
            function, *arguments = expectation
            result = function(reply, *arguments)
            assert result is None or result, (
                f"{function.__name__} {arguments}: {reply.status} {reply.response.text[:2000]}"
            )
        else:
            _require_fields(reply, expectation)


def _require_fields(reply: Reply, expected: Mapping[str, Any]) -> None:
    assert reply.status == 200, f"{reply.status} {reply.response.text[:2000]}"
    for path, expectation in expected.items():
        value = at(reply.json, path)
        assert fits(value, expectation), f"{path} is {value!r}, not {expectation}: {reply.response.text[:2000]}"


def fits(value: Any, expectation: Any) -> bool:
    """Return whether a value is the expected one, or the predicate holds."""
    match expectation:
        case {"empty": empty}:
            return (not value) is empty
        case {"at least": least}:
            return value >= least
        case {"within": [least, most]}:
            return least <= value <= most
        case {"starts with": text}:
            return value.startswith(text)
        case {"json": document}:
            return json.loads(value) == document
        case {"null or": kind}:
            return value is None or type(value).__name__ == kind
        case _:
            return value == expectation


def at(value: Any, path: str) -> Any:
    """Return what stands at a path; None: nothing does."""
    for name in path.removeprefix("#").split("."):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (LookupError, TypeError):
            return None
    return len(value) if path.startswith("#") else value


# ---- checks that several lists use


def refused(reply: Reply, *words: str) -> bool:
    """Expect a refusal with an error that has these words: those with information, such as a name or a token."""
    text = reply.response.text
    return reply.status == 400 and bool(reply.json["error"]) and all(word in text for word in words)


def ok(reply: Reply) -> bool:
    return reply.status == 200


def is_answered_with(reply: Reply, changes: dict[str, Any]) -> bool:
    return ok(reply.again(**changes))


def usage_adds_up(reply: Reply) -> bool:
    usage = reply.json["usage"]
    return usage["prompt_tokens"] > 0 and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def no_usage(reply: Reply) -> bool:
    return ok(reply) and bool(reply.events) and all(event.get("usage") is None for event in reply.events)


def usage_last(reply: Reply) -> bool:
    """True for a stream whose last chunk, and no other, has the tokens used."""
    *others, last = reply.events
    used = last["usage"]
    sums = used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"] > used["prompt_tokens"]
    return sums and last["choices"] == [] and all(event.get("usage") is None for event in others)


def streams_as_whole(reply: Reply) -> None:
    """A streamed answer: one finish for each choice, behind its text, which is that of the answer in one piece."""
    for choice in reply.again(stream=False, stream_options=None).json["choices"]:
        parts = [part for part in reply.streamed_choices if part["index"] == choice["index"]]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"]
        assert reply.streamed_text(choice["index"]) == (text_of(choice) or "")
        roles = [part["delta"]["role"] for part in parts if part.get("delta", {}).get("role")]
        assert roles == (["assistant"] if "message" in choice else [])


def text_of(choice: Any) -> Any:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def last_chunk_has_text(reply: Reply) -> bool:
    last = reply.streamed_choices[-1]
    return bool(last["text"] if "text" in last else last["delta"].get("content"))


def finishes_apart(reply: Reply) -> bool:
    """The last chunk has the finish and no text."""
    return ok(reply) and bool(reply.streamed_choices[-1]["finish_reason"]) and not last_chunk_has_text(reply)


def truncates(reply: Reply) -> bool:
    """The prompt is the tokens of one side of the whole prompt."""
    count, whole = reply.sent["truncate_prompt_tokens"], reply.again(truncate_prompt_tokens=None, truncation_side=None)
    kept, full = (
        body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"] for body in (reply.json, whole.json)
    )
    side = full[:count] if reply.sent["truncation_side"] == "right" else full[-count:]
    return kept == side and len(kept) == count < len(full)

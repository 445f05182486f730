"""A check: one request, and what vLLM's test of it asserts of the reply.

What a reply has to be is a map from paths to values (`choices.0.text`; `#choices` is a length), where a value may be a
predicate, or a function of the reply, for relations such as "streamed and whole are the same".
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import httpx2

from harness.quickstart import QUICKSTART

BASE, ADAPTER = "weft-quickstart", "acme/upper"
MODELS = (BASE, ADAPTER)
_CONFIG = json.loads((QUICKSTART / "model" / "config.json").read_text())
CONTEXT, HIDDEN, VOCABULARY = (_CONFIG[name] for name in ("max_position_embeddings", "hidden_size", "vocab_size"))
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    """What is asked. `metrics`: where the metrics of its engine are."""

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
    """What came back for which request."""

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
        """Send the same request, changed; one that is refused is an AssertionError."""
        reply = self.server.send("POST", path or self.path, {**self.sent, **changes})
        assert reply.status == 200, reply.response.text
        return reply

    def streamed_text(self, index: int = 0) -> str:
        """Return the streamed text of one choice."""
        own = [choice for choice in self.streamed_choices if choice["index"] == index]
        return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in own)

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


Expected: TypeAlias = Mapping[str, Any] | Callable[[Reply], object]


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
    for one in expected:
        if callable(one):
            found = one(reply)
            assert found is None or found, (
                f"{getattr(one, '__name__', one)}: {reply.status} {reply.response.text[:2000]}"
            )
        else:
            _require_fields(reply, one)


def _require_fields(reply: Reply, expected: Mapping[str, Any]) -> None:
    assert reply.status == 200, f"{reply.status} {reply.response.text[:2000]}"
    for path, value in expected.items():
        found = at(reply.json, path)
        fits = value(found) if callable(value) else found == value
        assert fits, f"{path} is {found!r}: {reply.response.text[:2000]}"


def at(value: Any, path: str) -> Any:
    """Return what stands at a path; None: nothing does."""
    for name in path.removeprefix("#").split(".") if path not in ("", "#") else ():
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (LookupError, TypeError):
            return None
    return len(value) if path.startswith("#") else value


# ---- what stands in the tables


def completion(test: str, *asserts: Expected, **body: Any) -> Check:
    """Make a check of a completion, of the base where no model is named."""
    return post(test, COMPLETIONS, {"model": BASE, "prompt": "Hello, my name is", "temperature": 0, **body}, *asserts)


def chat(test: str, *asserts: Expected, **body: Any) -> Check:
    """Make a check of a chat, with the base where no model is named."""
    messages = [
        {"role": "system", "content": "you are a helpful assistant"},
        {"role": "user", "content": "what is 1+1?"},
    ]
    return post(test, CHATS, {"model": BASE, "messages": messages, "temperature": 0, **body}, *asserts)


def post(test: str, path: str, body: Any, *asserts: Expected, **headers: str) -> Check:
    return Check(test, "POST", path, body, asserts, {name.replace("_", "-"): value for name, value in headers.items()})


def get(test: str, path: str, *asserts: Expected, **headers: str) -> Check:
    return Check(test, "GET", path, None, asserts, {name.replace("_", "-"): value for name, value in headers.items()})


def differs(why: str, check: Check, *instead: Expected) -> Check:
    """Make a check that Weft's reply is `instead`, for a reason."""
    return Check(check.test, check.method, check.path, check.body, check.asserts, check.headers, why, instead)


def refused(*words: str, status: int = 400) -> Expected:
    """Expect a refusal with an error that has these words: those with information, such as a name or a token."""

    def is_refused(reply: Reply) -> bool:
        text = reply.response.text
        return reply.status == status and bool(reply.json["error"]) and all(word in text for word in words)

    return is_refused


def ok(reply: Reply) -> bool:
    return reply.status == 200


def some(value: Any) -> bool:
    """True for what is not empty."""
    return bool(value)


def absent(value: Any) -> bool:
    return value is None


def at_least(least: float) -> Callable[[Any], bool]:
    return lambda value: value >= least


def within(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: least <= value <= most


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


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
    whole = reply.again(stream=False, stream_options=None).json["choices"]
    for choice in whole:
        own = [one for one in reply.streamed_choices if one["index"] == choice["index"]]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert reply.streamed_text(choice["index"]) == (text or "")
        roles = [one["delta"]["role"] for one in own if one.get("delta", {}).get("role")]
        assert roles == (["assistant"] if "message" in choice else [])


def last_chunk_has_text(reply: Reply) -> bool:
    last = reply.streamed_choices[-1]
    return bool(last["text"] if "text" in last else last["delta"].get("content"))


def finishes_apart(reply: Reply) -> bool:
    """The last chunk has the finish and no text."""
    last = reply.streamed_choices[-1]
    return ok(reply) and bool(last["finish_reason"]) and not last_chunk_has_text(reply)

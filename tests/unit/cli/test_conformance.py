"""`weft conformance` against a played server: right, and wrong in one way at a time."""

import asyncio
import json

import httpx2
import pytest

from weft_cli.errors import BadInput
from weft_conformance.checks import run
from weft_conformance.judging import (
    PROMPTS,
    Answer,
    Model,
    Verdict,
    attributed,
    discovered,
    fair,
    judged,
    model_of,
    updated,
)

MODELS = ("base", "a", "b")


class Played:
    """An OpenAI-compatible server whose models answer with their name and the prompt. `fault`: how it is wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.active: list[str] = []
        self.prefixes: dict[str, str] = {}  # who computed a prompt first

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            listed = MODELS[:2] if self.fault == "lists one adapter" else MODELS
            return httpx2.Response(200, json={"data": [{"id": name, "parent": _parent(name)} for name in listed]})
        body = json.loads(request.content)
        if body["model"] not in MODELS and self.fault != "answers for any name":
            return httpx2.Response(404, json={"error": {"message": "no such model"}})
        self.active.append(body["model"])
        await asyncio.sleep(0)  # others come in
        text = f"{self._weights(body)} says {body['prompt']}"
        self.active.remove(body["model"])
        return httpx2.Response(200, text=f"data: {json.dumps({'choices': [{'text': text}]})}\n\ndata: [DONE]\n\n")

    def _weights(self, body: dict[str, str]) -> str:
        if self.fault == "ignores adapters":
            return "base"
        if self.fault == "one adapter a batch":
            return self.active[-1]
        if self.fault == "one prefix cache for all" and "cache_salt" not in body and len(body["prompt"]) > 100:
            return self.prefixes.setdefault(body["prompt"], body["model"])
        return body["model"]


def _parent(name: str) -> str | None:
    return None if name == "base" else "base"


async def verdicts(fault: str, update: str | None = None) -> dict[str, Verdict]:
    transport = httpx2.MockTransport(Played(fault))
    base, adapters = Model("base"), [Model("a"), Model("b")]
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        # A clock that stands still: how long this process takes says nothing of the server's fairness.
        _, results = await run(client, base, adapters, update, lambda _: None, clock=lambda: 0.0)
    return {one.name: one.verdict for one in results}


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("", set()),
        ("lists one adapter", {"listed"}),
        ("ignores adapters", {"own-answers"}),
        ("answers for any name", {"unknown"}),
        ("one adapter a batch", {"beside", "slots", "alternation", "starvation"}),
        ("one prefix cache for all", {"prefix-cache"}),
    ],
)
async def test_each_fault_fails_its_checks_and_no_other(fault: str, failing: set[str]) -> None:
    found = await verdicts(fault)
    assert {name for name, verdict in found.items() if verdict is Verdict.FAIL} == failing
    assert found["update"] is Verdict.NOT_APPLICABLE


async def test_a_base_and_two_adapters_are_needed() -> None:
    transport = httpx2.MockTransport(Played("lists one adapter"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        with pytest.raises(BadInput, match="at least 2 adapters"):
            await run(client, None, [], None, lambda _: None)


def test_an_answer_is_of_the_model_whose_reference_it_follows_longest() -> None:
    texts = {"base": "the hall", "a": "the house", "b": "a hut"}
    assert attributed("the house", texts) == "a"
    assert attributed("the hou..", texts) == "a"
    assert attributed("the h...", texts) is None
    assert attributed("xyz", texts) is None
    references = {PROMPTS[0]: texts}
    assert judged([Answer("a", PROMPTS[0], "the house!")], references).verdict is Verdict.PASS
    wrong = judged([Answer("a", PROMPTS[0], "a hut")], references)
    assert (wrong.verdict, wrong.detail.endswith("which is of b")) == (Verdict.FAIL, True)


def test_a_rare_adapter_may_wait_twice_as_long_as_the_flood_itself() -> None:
    assert fair([1.9, 0.1, 2.0], [0.9, 1.0, 1.1], 0.1).verdict is Verdict.PASS
    assert fair([2.2, 0.1, 2.2], [0.9, 1.0, 1.1], 0.1).verdict is Verdict.FAIL


def test_an_answer_during_an_update_is_of_one_content() -> None:
    old, new = {"p": "old words"}, {"p": "new words"}
    both = [Answer("a", "p", "old words"), Answer("a", "p", "new words")]
    assert updated(both, old, new).verdict is Verdict.PASS
    assert updated([*both, Answer("a", "p", "mixed")], old, new).verdict is Verdict.FAIL


def test_models_are_names_with_fields_and_found_by_their_parent() -> None:
    assert model_of('a={"lora": []}') == Model("a", {"lora": []})
    with pytest.raises(BadInput, match="JSON object"):
        model_of("a={")
    listed = [{"id": "m"}, {"id": "a", "parent": "m"}, {"id": "b", "parent": "m"}, {"id": "c", "parent": "n"}]
    assert discovered(listed, None) == ("m", ["a", "b"])
    assert discovered(listed, "n") == ("n", ["c"])
    with pytest.raises(BadInput, match="parent"):
        discovered(listed[:1], None)

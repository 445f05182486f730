"""What `weft up` waits for and what it then says, without starting anything."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from harness.waiting import soon
from weft.process import data_root
from weft_cli import up
from weft_cli.demo import Question, with_keys
from weft_cli.errors import CommandError
from weft_cli.progress import Progress
from weft_operator.local import ObjectStore, ref_of

POOL = {"kind": "ServingPool", "metadata": {"name": "base", "namespace": "default"}, "spec": {"model": {}}}
ADAPTER = {
    "kind": "LoRAAdapter",
    "metadata": {"name": "upper", "namespace": "acme"},
    "spec": {"poolRef": {"name": "elsewhere"}},
}
OBJECTS: list[Any] = [{"apiVersion": "v1", **obj} for obj in (POOL, ADAPTER)]


def stack_of(objects: Sequence[Any]) -> Any:
    store = ObjectStore(lambda: 0.0)
    for obj in objects:
        store.apply(obj)
    addresses = SimpleNamespace(gateway_url="http://127.0.0.1:1")
    return SimpleNamespace(
        store=store, addresses=addresses, options=SimpleNamespace(auth=False, data_dir=data_root().absolute())
    )


def settle(stack: Any, obj: Any, kind: str, status: str, reason: str = "Because") -> None:
    meta = stack.store.get(ref_of(obj))["metadata"]
    conditions = [{"type": kind, "status": status, "reason": reason, "message": "m"}]
    name = f"{meta['namespace']}/{meta['name']}"
    written = {"observedGeneration": meta["generation"], "modelName": name, "conditions": conditions}
    stack.store.set_status(ref_of(obj), meta["uid"], meta["resourceVersion"], written)


async def bring_up(stack: Any, *, all_ready: bool = False, needed: Sequence[Any] = ()) -> list[str]:
    refs = [ref_of(obj) for obj in OBJECTS]
    return await up._bring_up(  # pyright: ignore[reportPrivateUsage]
        stack, refs, Progress(), all_ready=all_ready, needed=[ref_of(obj) for obj in needed]
    )


async def test_the_start_waits_for_every_object(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, looked, undecided = stack_of(OBJECTS), asyncio.Event(), up._undecided

    def looking(*what: Any) -> Any:
        looked.set()
        return undecided(*what)

    monkeypatch.setattr(up, "_undecided", looking)
    waiting = asyncio.create_task(bring_up(stack))
    await soon(looked.wait())
    looked.clear()
    settle(stack, OBJECTS[0], "Available", "True")
    await soon(looked.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    settle(stack, OBJECTS[1], "Ready", "True")
    assert await soon(waiting) == []


async def test_a_pool_that_is_scaled_to_zero_is_as_it_was_wished() -> None:
    stack = stack_of(OBJECTS)
    settle(stack, OBJECTS[0], "Available", "False", "ScaledToZero")
    settle(stack, OBJECTS[1], "Ready", "True")
    assert await bring_up(stack) == []


async def test_what_is_not_ready_in_time_is_told_and_the_rest_is_served(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "READY_S", 0.05)
    stack = stack_of(OBJECTS)
    settle(stack, OBJECTS[1], "Ready", "True")
    assert await bring_up(stack) == ["ServingPool default/base: nothing known yet"]
    assert "ServingPool default/base: nothing known yet" in capfd.readouterr().err
    with pytest.raises(CommandError, match="not ready after"):
        await bring_up(stack, all_ready=True)


@pytest.mark.parametrize(
    ("kind", "status", "reason"), [("Fetched", "False", "MissingFile"), ("Progressing", "False", "CrashLoop")]
)
async def test_a_base_that_cannot_be_served_ends_a_stack_that_needs_it(kind: str, status: str, reason: str) -> None:
    stack = stack_of(OBJECTS)
    settle(stack, OBJECTS[0], kind, status, reason)
    with pytest.raises(CommandError, match="ServingPool default/base"):
        await soon(bring_up(stack, needed=OBJECTS[:1]))


def test_the_banner_of_a_demo_with_keys_can_be_pasted(capfd: pytest.CaptureFixture[str]) -> None:
    stack = stack_of([])
    stack.options.auth = True
    questions = with_keys(
        [Question(name, "hi", "HI") for name in ("base", "acme/upper", "b/m")], {"acme": "a", "b": "c"}
    )
    assert [question.key for question in questions] == ["a", "a", "c"]
    up._banner(stack, questions)  # pyright: ignore[reportPrivateUsage]
    said = capfd.readouterr().out
    assert '-H "Authorization: Bearer a"' in said
    assert 'api_key="a"' in said
    assert "API key of b: c" in said

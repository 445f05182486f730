"""A pool whose model is larger than its memory beside one that has it whole, and one whose budget holds no policy."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import yaml

from harness.native_models import write_model
from harness.quickstart import QUICKSTART
from harness.waiting import PATIENCE_S, eventually
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

MIB = 1 << 20
WHOLE, STREAMED, IMPOSSIBLE = "whole", "streamed", "impossible"
BUDGETS = {STREAMED: 32 * MIB, IMPOSSIBLE: MIB}
SHAPE = {
    "vocab_size": 106, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
PROMPT = "Seven foxes met 3 wolves"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Some 50 MB of weights, by a random model."""
    folder = tmp_path_factory.mktemp("m")
    files = write_model(folder / "model", 5, **SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / "model" / name, folder / "model")
    assert files["model.safetensors"].stat().st_size > BUDGETS[STREAMED]
    for name in (WHOLE, STREAMED, IMPOSSIBLE):
        spec: dict[str, Any] = {"model": {"uri": "file:model", "name": name}}
        if name in BUDGETS:
            disk = str(tmp_path_factory.mktemp("d"))
            spec["memory"] = {"offload": {"deviceBytes": BUDGETS[name], "diskPath": disk}}
        pool = {
            "apiVersion": "serving.weft.dev/v1alpha1", "kind": "ServingPool",
            "metadata": {"name": name, "namespace": "default"}, "spec": spec,
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(pool))
    with Stack(folder, tmp_path_factory.mktemp("w")) as made:
        made.wait_for_models(2)
        yield made


async def streamed(stack: Stack, model: str) -> list[str]:
    """The pieces of an answer; none while the model is not served yet."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stream": True}
    pieces: list[str] = []
    async with (
        httpx2.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            return []
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return pieces


def offloaded(stack: Stack) -> list[str]:
    """The row of `weft top` about the runner that offloads."""
    lines = stack.cli("top", "--once", "--interval", "0.1").stdout.splitlines()
    return next((lines[i + 1 :] for i, line in enumerate(lines) if line.startswith("OFFLOADED")), [])


async def test_one_request_streams_what_the_whole_model_answers_and_top_shows_its_disk_and_time(stack: Stack) -> None:
    async def served() -> bool:
        return bool(await streamed(stack, WHOLE)) and bool(await streamed(stack, STREAMED))

    await eventually(served)
    expected, found = await streamed(stack, WHOLE), await streamed(stack, STREAMED)
    assert "".join(found) == "".join(expected) != ""
    assert len(found) > 4, "it comes as it is computed"

    async def shown() -> bool:
        return any("ms a token" in row and "GB/s" in row for row in offloaded(stack))

    await eventually(shown)
    logs = [stack.cli("logs", name, "--tail", "200").stdout for name in stack.names("runner-")]
    assert any("the policy of offloading" in log for log in logs)


async def test_a_budget_that_holds_no_policy_is_named_and_the_other_pools_serve(stack: Stack) -> None:
    async def named() -> bool:
        status = stack.controller.get("servingpools", "default", IMPOSSIBLE).get("status", {})
        return "too few" in json.dumps(status)

    await eventually(named)
    assert await streamed(stack, WHOLE)

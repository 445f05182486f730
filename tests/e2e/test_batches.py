"""The Batch API on whole stacks: the official client and `weft batch`, tenants, a cancelled batch, processes killed."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from harness.crowd import SLOW
from harness.quickstart import ROOT, Case, copy_manifests, sure_cases
from harness.waiting import eventually
from weft_stage.stack import Stack, quickstart

pytestmark = pytest.mark.slow

MODELS = ("acme/upper", "acme/reverse-words")
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The quickstart with keys."""
    with Stack(quickstart(), tmp_path_factory.mktemp("w"), "--auth") as made:
        asyncio.run(eventually(lambda: has_keys(made)))
        yield made


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One slow runner without keys."""
    manifests = copy_manifests(tmp_path_factory.mktemp("m"), advanced={"maxSequences": 4})
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=SLOW) as made:
        made.wait_for_models()
        yield made


async def has_keys(stack: Stack) -> bool:
    return stack.cli("key", "list", check=False).returncode == 0


def client_of(stack: Stack, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=5)


def body_of(case: Case, seed: int) -> dict[str, Any]:
    return {"model": case.model, "prompt": case.prompt, "seed": seed, "temperature": 0.8, "max_tokens": 60}


def line(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def start(client: openai.OpenAI, lines: Sequence[dict[str, Any]]) -> Batch:
    data = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


async def until(client: openai.OpenAI, batch: Batch, completed: int | None = None) -> Batch:
    """Wait until the batch has ended, or has `completed` lines. Returns it as it is then."""
    now = batch

    async def reached() -> bool:
        nonlocal now
        try:
            now = client.batches.retrieve(batch.id)
        except (openai.APIConnectionError, openai.InternalServerError):
            return False  # a process is away
        done = now.request_counts.completed if now.request_counts else 0
        return now.status in ENDED or (completed is not None and done >= completed)

    await eventually(reached)
    return now


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by their custom_id, each of which is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(one) for one in client.files.content(file_id).content.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines), "a custom_id is there twice"
    return found


def text_of(answered: dict[str, Any]) -> str:
    assert answered["response"]["status_code"] == 200
    return answered["response"]["body"]["choices"][0]["text"]


async def test_a_tenants_batch_is_answered_line_by_line_and_nobody_else_sees_it(locked: Stack) -> None:
    key, other = locked.create_key("acme"), locked.create_key("globex")
    cases = sure_cases(MODELS, 12, seed=3)
    bad = {
        "foreign": {"model": "globex/initials", "prompt": "hello"},
        "streamed": {"model": MODELS[0], "prompt": "hello", "stream": True},
        "wrong": {"model": MODELS[0], "prompt": "hello", "temperature": "warm"},
        "long": {"model": MODELS[0], "prompt": "hello", "max_tokens": 1_000_000},
    }
    with client_of(locked, key) as acme, client_of(locked, other) as globex:

        async def known() -> bool:
            try:
                return bool(acme.models.list().data and globex.models.list().data)
            except openai.APIStatusError:
                return False

        await eventually(known)
        direct = [acme.completions.create(**body_of(case, seed)).choices[0].text for seed, case in enumerate(cases)]
        lines = [line(f"line {i}", body_of(case, i)) for i, case in enumerate(cases)]
        lines[10:10] = [line(custom_id, body) for custom_id, body in bad.items()]
        batch = await until(acme, start(acme, lines))
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 16, "completed": 12, "failed": 4}
        answers, errors = read(acme, batch.output_file_id), read(acme, batch.error_file_id)
        assert [text_of(answers[f"line {i}"]) for i in range(12)] == direct
        assert {name: one["response"]["status_code"] for name, one in errors.items()} == {
            "foreign": 404, "streamed": 400, "wrong": 400, "long": 400,
        }  # fmt: skip
        assert batch.usage is not None
        assert batch.usage.output_tokens == sum(
            one["response"]["body"]["usage"]["completion_tokens"] for one in answers.values()
        )

        assert globex.batches.list().data == []
        assert globex.files.list().data == []
        for ask, name in (
            (globex.batches.retrieve, batch.id),
            (globex.batches.cancel, batch.id),
            (globex.files.content, batch.output_file_id or ""),
            (globex.files.delete, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(name)


async def test_a_cancelled_batch_keeps_what_was_answered(slow: Stack) -> None:
    with client_of(slow) as client:
        cases = sure_cases(MODELS, 60, seed=5)
        batch = start(client, [line(str(i), body_of(case, i)) for i, case in enumerate(cases)])
        await until(client, batch, completed=2)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = await until(client, batch)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        answers = read(client, batch.output_file_id)
        assert 2 <= len(answers) == batch.request_counts.completed < 60


@pytest.fixture(scope="module")
def baselines(slow: Stack) -> list[tuple[dict[str, Any], str]]:
    """Return 16 requests, which the runner has four at a time of, and what an interactive client gets for them."""
    bodies = [body_of(case, seed) for seed, case in enumerate(sure_cases(MODELS, 16, seed=7))]
    with client_of(slow) as client:
        return [(body, client.completions.create(**body).choices[0].text) for body in bodies]


@pytest.mark.parametrize("struck", ["gateway", "batch", "scheduler", "supervisor", "runner"])
async def test_a_process_is_killed_and_every_line_is_answered_once_with_the_same_text(
    slow: Stack, baselines: list[tuple[dict[str, Any], str]], struck: str
) -> None:
    with client_of(slow) as client:
        batch = start(client, [line(str(i), body) for i, (body, _) in enumerate(baselines)])
        before = await until(client, batch, completed=3)
        assert before.status == "in_progress"
        os.kill(slow.pid(slow.names(struck)[0]), signal.SIGKILL)
        batch = await until(client, batch)
        assert batch.status == "completed", batch
        assert read(client, batch.error_file_id) == {}
        answers = read(client, batch.output_file_id)
        assert [text_of(answers[str(i)]) for i in range(len(baselines))] == [text for _, text in baselines]


def test_the_command_runs_the_example_and_names_the_line_that_failed(slow: Stack, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = slow.cli("batch", "run", str(ROOT / "examples" / "batch.jsonl"), "-o", str(out), check=False)
    assert done.returncode == 1, done.stderr
    assert "1 x model_not_found" in done.stderr
    texts = {one["custom_id"]: text_of(one) for one in map(json.loads, out.read_text().splitlines())}
    assert texts == {"upper": "WEFT SERVES ADAPTERS", "reverse": "three two one", "initials": "mmtm"}
    assert "batch.jsonl" in slow.cli("batch", "list").stdout

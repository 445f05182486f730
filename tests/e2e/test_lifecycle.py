"""Adapters come, change and go while the stack runs: seconds, no restart, no interrupted stream."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml

from harness.crowd import SLOW, assert_undisturbed, crowd
from harness.quickstart import Case, adapter_manifest, copy_manifests, sure_cases, tasks
from harness.waiting import PATIENCE_S, eventually
from weft.domain.adapter import Tier
from weft_stage.reports import runners
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

POOL = "weft-system/quickstart"
PROMPT = "Seven foxes met 3 wolves"


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_manifests(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def stack(manifests: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=SLOW) as made:
        made.wait_for_models()
        yield made


def apply(stack: Stack, folder: Path, manifest: dict[str, object]) -> None:
    path = folder / "one.yaml"
    path.write_text(yaml.safe_dump(manifest))
    stack.cli("apply", "-f", str(path))


async def answer(stack: Stack, model: str, **more: str) -> str | int:
    """The text, or the HTTP status."""
    async with httpx2.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
        body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 60, **more}
        got = await client.post("/v1/completions", json=body)
    return got.json()["choices"][0]["text"] if got.status_code == 200 else got.status_code


async def is_answered(stack: Stack, model: str, text: str) -> bool:
    return await answer(stack, model) == text


async def digest_of(stack: Stack, name: str, namespace: str, *, instead_of: str | None = None) -> str:
    """Waits for it: the operator writes a status a few seconds after the adapter answers."""
    found: list[str] = []

    async def written() -> bool:
        status = stack.controller.get("loraadapters", namespace, name).get("status", {})
        found[:] = [status.get("digest", "")]
        return found[0] not in ("", instead_of)

    await eventually(written)
    return found[0]


async def tiers(stack: Stack, digest: str) -> set[Tier]:
    """In which tiers runners have a digest."""
    listed = await runners(stack.address("supervisor"))
    return {runner.adapters[digest].tier for runner in listed if digest in runner.adapters}


async def test_an_edited_source_swaps_and_running_streams_finish_on_the_old_one(
    stack: Stack, manifests: Path, tmp_path: Path
) -> None:
    source = manifests / "adapters" / "changing"
    shutil.copytree(manifests / "adapters" / "upper", source)
    with (source / "adapter_config.json").open("a") as config:
        config.write("\n")  # a digest of its own
    apply(stack, tmp_path, adapter_manifest("changing", "acme", "file:adapters/changing", revisionHistoryLimit=0))

    async def served(text: str) -> bool:
        return await answer(stack, "acme/changing") == text

    await eventually(lambda: served(PROMPT.upper()))
    old = await digest_of(stack, "changing", "acme")
    running = [Case("acme/changing", c.prompt, c.prompt.upper()) for c in sure_cases(("acme/upper",), 4, seed=5)]
    async with crowd(stack.url, running, "swap") as made:
        await made.until(lambda: all(w.text for w in made.streams))
        assert made.running
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            fresh = tmp_path / name
            shutil.copy(manifests / "adapters" / "cipher" / name, fresh)
            fresh.replace(source / name)
    assert_undisturbed(list(made.streams))
    await eventually(lambda: served(tasks().expected("cipher", PROMPT)))
    await digest_of(stack, "changing", "acme", instead_of=old)

    async def left() -> bool:
        return await tiers(stack, old) == set()

    await eventually(left)


async def test_a_canary_answers_its_share_of_the_users_and_then_all(stack: Stack, tmp_path: Path) -> None:
    ciphered = tasks().expected("cipher", PROMPT)
    source, name = "file:adapters/upper", "trial"
    apply(stack, tmp_path, adapter_manifest(name, "acme", source))
    await eventually(lambda: is_answered(stack, "acme/trial", PROMPT.upper()))
    canary = {"source": {"uri": "file:adapters/cipher"}, "version": "next", "weight": 30}
    apply(stack, tmp_path, adapter_manifest(name, "acme", source, canary=canary))
    await eventually(lambda: is_answered(stack, "acme/trial@next", ciphered))

    async def of_users() -> list[str | int]:
        return await asyncio.gather(*(answer(stack, "acme/trial", user=f"user-{n}") for n in range(40)))

    first = await of_users()
    assert set(first) == {PROMPT.upper(), ciphered}
    assert await of_users() == first, "a user stays with one content"

    def counted() -> bool:
        status = stack.controller.get("loraadapters", "acme", name).get("status", {}).get("canary", {})
        return status.get("requests", 0) >= first.count(ciphered) and status["failedRequests"] == 0

    await eventually(lambda: asyncio.to_thread(counted))
    apply(stack, tmp_path, adapter_manifest(name, "acme", source, canary={**canary, "weight": 60}))

    async def more() -> bool:
        return (await of_users()).count(ciphered) > first.count(ciphered)

    await eventually(more)
    later = await of_users()
    assert all(now == ciphered for was, now in zip(first, later, strict=True) if was == ciphered)
    apply(stack, tmp_path, adapter_manifest(name, "acme", "file:adapters/cipher"))

    async def all_of_it() -> bool:
        return set(await of_users()) == {ciphered}

    await eventually(all_of_it)


async def test_a_pushed_content_is_served_and_the_one_before_it_to_streams_and_pins(
    stack: Stack, manifests: Path
) -> None:
    quickstart = manifests / "adapters"
    first = stack.cli("push", "pushed", str(quickstart / "upper"), "-n", "acme", "--pool", POOL, "--version", "step-1")
    digest = first.stdout.strip()
    assert await answer(stack, "acme/pushed") == PROMPT.upper()
    running = [Case("acme/pushed", c.prompt, c.prompt.upper()) for c in sure_cases(("acme/upper",), 4, seed=7)]
    async with crowd(stack.url, running, "push") as made:
        await made.until(lambda: all(w.text for w in made.streams))
        assert made.running
        stack.cli("push", "pushed", str(quickstart / "cipher"), "-n", "acme", "--version", "step-2")
        ciphered = tasks().expected("cipher", PROMPT)
        answers = [await answer(stack, f"acme/pushed{pin}") for pin in ("", "@step-2", "@step-1", f"@{digest}")]
        assert answers == [ciphered, ciphered, PROMPT.upper(), PROMPT.upper()]
    assert_undisturbed(list(made.streams))
    assert await answer(stack, "acme/pushed@step-3") == 404
    late = stack.cli("push", "pushed", str(quickstart / "digits"), "-n", "acme", "--if-digest", digest, check=False)
    assert late.returncode == 1
    assert "nothing was published" in late.stderr
    moved = stack.cli("push", "pushed", str(quickstart / "digits"), "-n", "acme", "--pool", "other", check=False)
    assert f"is in the pool {POOL}, not other: nothing was published" in moved.stderr
    assert await answer(stack, "acme/pushed") == ciphered


async def test_of_two_pushes_from_one_content_one_is_published(stack: Stack, manifests: Path) -> None:
    quickstart = manifests / "adapters"
    first = stack.cli("push", "raced", str(quickstart / "upper"), "-n", "acme", "--pool", POOL).stdout.strip()

    def push(name: str) -> int:
        folder = str(quickstart / name)
        return stack.cli("push", "raced", folder, "-n", "acme", "--if-digest", first, check=False).returncode

    codes = await asyncio.gather(asyncio.to_thread(push, "cipher"), asyncio.to_thread(push, "digits"))
    assert sorted(codes) == [0, 1]
    winner = ("cipher", "digits")[codes.index(0)]
    assert await answer(stack, "acme/raced") == tasks().expected(winner, PROMPT)


async def test_an_answer_ends_with_the_token_that_the_adapters_own_tokenizer_names(
    stack: Stack, manifests: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(manifests / "adapters" / "upper", tmp_path / "own")
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "X"}))
    stack.cli("push", "own", str(own), "-n", "acme", "--pool", POOL)
    assert await answer(stack, "acme/own") == "SEVEN FO"
    assert ", and the base's\n" in stack.cli("describe", "lora", "own", "-n", "acme").stdout


async def test_chat_templates_of_specs_come_and_go_and_no_runner_is_replaced(
    stack: Stack, manifests: Path, tmp_path: Path
) -> None:
    pool = yaml.safe_load((manifests / "01-pool.yaml").read_text())
    base, own = pool["spec"]["model"]["name"], "acme/templated"

    async def becomes(model: str, text: str | int) -> None:
        """The prompt of a chat with this model, or the status of the error."""

        async def rendered() -> bool:
            async with httpx2.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
                body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "return_token_strs": True}
                got = await client.post("/tokenize", json=body)
            return ("".join(got.json()["token_strs"]) if got.status_code == 200 else got.status_code) == text

        await eventually(rendered)

    def given(text: str | None) -> dict[str, object]:
        model = pool["spec"]["model"] | ({"chatTemplate": {"from": "Inline", "inline": text}} if text else {})
        return pool["spec"] | {"model": model}

    before = {runner.spec.runner for runner in await runners(stack.address("supervisor"))}
    template = {"from": "Inline", "inline": "<{{ messages[0].content }}>"}
    apply(stack, tmp_path, adapter_manifest("templated", "acme", "file:adapters/upper", chatTemplate=template))
    await becomes(own, "<hello>")
    for text, prompt in (("({{ messages[0].content }})", "(hello)"), ("{% if %}", 400)):
        apply(stack, tmp_path, pool | {"spec": given(text)})
        await becomes(base, prompt)
        await becomes("acme/upper", prompt)
        await becomes(own, "<hello>")
        assert await answer(stack, "acme/upper") == PROMPT.upper()
    assert "TemplateFault" in (
        described := stack.cli("describe", "spool", pool["metadata"]["name"], "-n", "weft-system").stdout
    )
    assert "Inline of the spec, sha256:" in described
    apply(stack, tmp_path, pool | {"spec": given(None)})
    await becomes(base, "<s>hello<sep>")
    assert {runner.spec.runner for runner in await runners(stack.address("supervisor"))} == before


def test_a_push_of_what_does_not_fit_the_base_says_why_and_the_content_before_it_serves(
    stack: Stack, manifests: Path, tmp_path: Path
) -> None:
    source = manifests / "adapters" / "upper"
    stack.cli("push", "fitting", str(source), "-n", "acme", "--pool", POOL)
    bad = shutil.copytree(source, tmp_path / "bad")
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(config | {"r": config["r"] * 2}))
    refused = stack.cli("push", "fitting", str(bad), "-n", "acme", check=False)
    assert refused.returncode == 1
    assert "acme/fitting" in refused.stderr
    assert "ShapeMismatch" in refused.stderr
    assert "still serves" in stack.cli("get", "lora", "fitting", "-n", "acme", "-o", "json").stdout
    assert "UpdateFailed" in stack.cli("get", "lora", "fitting", "-n", "acme").stdout


async def test_a_deleted_adapter_is_unknown_at_once_and_leaves_every_tier(stack: Stack, tmp_path: Path) -> None:
    weights = stack.data_dir / "runners"
    apply(stack, tmp_path, adapter_manifest("leaving", "globex", "file:adapters/json", modelName="globex/leaving"))
    stack.cli("delete", "lora", "json", "-n", "initech")  # the other user of this digest

    async def ready() -> bool:
        return await answer(stack, "globex/leaving") == tasks().expected("json", PROMPT)

    await eventually(ready)
    digest = await digest_of(stack, "leaving", "globex")

    async def on_device() -> bool:
        return Tier.DEVICE in await tiers(stack, digest)

    await eventually(on_device)  # the runner's report may come after its answer
    assert list(weights.rglob(digest.removeprefix("sha256:")))
    running = [Case("globex/leaving", c.prompt, c.expect) for c in sure_cases(("initech/json",), 4, seed=6)]
    async with crowd(stack.url, running, "delete") as made:
        await made.until(lambda: all(w.text for w in made.streams))
        assert made.running
        stack.cli("delete", "lora", "leaving", "-n", "globex")

        async def unknown() -> bool:
            return await answer(stack, "globex/leaving") == 404

        await eventually(unknown)
    assert_undisturbed(list(made.streams))

    async def left() -> bool:
        return await tiers(stack, digest) == set() and not list(weights.rglob(digest.removeprefix("sha256:")))

    await eventually(left)

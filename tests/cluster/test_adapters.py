"""Adapters come, change and go on a running cluster: no restart, and nobody else notices."""

import asyncio
import shutil
from typing import Any

import httpx2

from harness.crowd import assert_undisturbed, crowd, load
from harness.installation import NAMESPACE, Installation
from harness.quickstart import Case, adapter_manifest, sure_cases, tasks
from harness.waiting import PATIENCE_S, eventually

PROMPT = "Seven foxes met 3 wolves"
BAD: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("wide", {"uri": "file:adapters/cipher"}, {"maxRank": 1}, "RankTooLarge"),
    ("other", {"uri": "file:adapters/json", "digest": f"sha256:{'0' * 64}"}, {}, "DigestMismatch"),
    ("away", {"uri": "s3://adapters/upper", "endpoint": "http://127.0.0.1:9"}, {}, "SourceUnreachable"),
)
BAD_NAMES = [name for name, *_ in BAD]


async def answer(url: str, model: str) -> str | int:
    """The text, or the HTTP status."""
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        asked = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
        got = await client.post("/v1/completions", json=asked)
    return got.json()["choices"][0]["text"] if got.status_code == 200 else got.status_code


async def until_answer(url: str, model: str, wanted: str | int) -> None:
    async def given() -> bool:
        return await answer(url, model) == wanted

    await eventually(given)


def runner_pods(installation: Installation) -> list[tuple[str, int]]:
    """Uid and restarts of each runner pod."""
    return [
        (pod["metadata"]["uid"], sum(c["restartCount"] for c in pod["status"]["containerStatuses"]))
        for pod in installation.pods("app.kubernetes.io/component=runner")
    ]


def adapter(installation: Installation, name: str, namespace: str) -> dict[str, Any]:
    return installation.plane.get("lora", name, namespace)


async def test_a_new_adapter_is_ready_without_a_restart(installation: Installation) -> None:
    before = runner_pods(installation)
    assert await answer(installation.url, "acme/shout") == 404
    installation.plane.apply(adapter_manifest("shout", "acme", "file:adapters/upper"))
    await until_answer(installation.url, "acme/shout", PROMPT.upper())
    installation.wait_ready("acme/shout")
    assert runner_pods(installation) == before
    installation.plane.kubectl("delete", "lora", "shout", "-n", "acme")


async def test_new_weights_under_the_same_name_are_swapped_and_the_status_says_so(installation: Installation) -> None:
    source = installation.sources / "adapters" / "changing"
    shutil.copytree(installation.sources / "adapters" / "upper", source)
    with (source / "adapter_config.json").open("a") as config:
        config.write("\n")  # a digest of its own
    installation.publish()
    spec = {"revisionHistoryLimit": 0}  # earlier contents are served to requests that pin them
    installation.plane.apply(adapter_manifest("changing", "acme", "file:adapters/changing", **spec))
    await until_answer(installation.url, "acme/changing", PROMPT.upper())
    await asyncio.to_thread(installation.wait_ready, "acme/changing")
    old = adapter(installation, "changing", "acme")["status"]["digest"]
    running = [Case("acme/changing", c.prompt, c.prompt.upper()) for c in sure_cases(("acme/upper",), 4, seed=5)]
    async with crowd(installation.url, running, "swap") as made:
        await made.until(lambda: all(w.text for w in made.streams))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            fresh = installation.folder / name
            shutil.copy(installation.sources / "adapters" / "cipher" / name, fresh)
            fresh.chmod(0o644)
            fresh.replace(source / name)
        await asyncio.to_thread(installation.publish)
    assert_undisturbed(list(made.streams))
    await until_answer(installation.url, "acme/changing", tasks().expected("cipher", PROMPT))

    def told() -> bool:
        status = adapter(installation, "changing", "acme")["status"]
        return status["digest"] != old and status["unavailableRunners"] == 0

    await eventually(lambda: asyncio.to_thread(told))
    await until_gone(installation, old)
    installation.plane.kubectl("delete", "lora", "changing", "-n", "acme")


async def test_an_adapter_that_moves_to_another_pool_fails_no_request(installation: Installation) -> None:
    """The new pool is made with the edit: its base and its runner come up while the old one serves."""
    plane, second = installation.plane, {"name": "second", "namespace": NAMESPACE}
    pool = plane.get("spool", "quickstart", NAMESPACE)
    plane.apply(adapter_manifest("mover", "acme", "file:adapters/upper"))
    await asyncio.to_thread(installation.wait_ready, "acme/mover")
    cases = [Case("acme/mover", c.prompt, c.expect) for c in sure_cases(("acme/upper",), 8, seed=9)]
    try:
        async with load(installation.url, cases, "move", 4) as made:
            await made.until(lambda: all(w.text for w in made.streams))
            spec = pool["spec"] | {"model": pool["spec"]["model"] | {"name": "weft-second"}}
            plane.apply({"apiVersion": pool["apiVersion"], "kind": pool["kind"], "metadata": second, "spec": spec})
            plane.apply(
                adapter_manifest("mover", "acme", "file:adapters/upper", poolRef=second, baseModel="weft-second")
            )

            def moved() -> bool:
                status = adapter(installation, "mover", "acme")["status"]
                return status["pool"] == f"{NAMESPACE}/second" and status["unavailableRunners"] == 0

            await eventually(lambda: asyncio.to_thread(moved))
            asked = len(made.streams)
            await made.until(lambda: len(made.streams) > asked + 8)
        assert_undisturbed(list(made.streams))
    finally:
        await asyncio.to_thread(plane.kubectl, "delete", "lora", "mover", "-n", "acme", "--ignore-not-found")
        await asyncio.to_thread(plane.kubectl, "delete", "spool", "second", "-n", NAMESPACE, "--ignore-not-found")


async def test_a_deleted_adapter_answers_404_and_leaves_every_runner(installation: Installation) -> None:
    source = installation.sources / "adapters" / "leaving"
    shutil.copytree(installation.sources / "adapters" / "json", source)
    with (source / "adapter_config.json").open("a") as config:
        config.write("\n")
    installation.publish()
    installation.plane.apply(adapter_manifest("leaving", "globex", "file:adapters/leaving"))
    await until_answer(installation.url, "globex/leaving", tasks().expected("json", PROMPT))
    await asyncio.to_thread(installation.wait_ready, "globex/leaving")  # routed a moment before its status says so
    digest = adapter(installation, "leaving", "globex")["status"]["digest"]
    assert any(on_disk(installation, pod, digest) for pod in installation.names("runner"))
    await asyncio.to_thread(installation.plane.kubectl, "delete", "lora", "leaving", "-n", "globex")
    assert await answer(installation.url, "globex/leaving") == 404
    await until_gone(installation, digest)


async def until_gone(installation: Installation, digest: str) -> None:
    """From device and host of every runner, as they report it, and from their disks."""

    async def left() -> bool:
        listed = await installation.runners()
        if any(digest in runner.adapters for runner in listed):
            return False
        return not any(
            [await asyncio.to_thread(on_disk, installation, pod, digest) for pod in installation.names("runner")]
        )

    await eventually(left)


def on_disk(installation: Installation, pod: str, digest: str) -> str:
    """Files of a runner's data directory that are named by the digest."""
    find = ("find", "/var/lib/weft", "-name", f"*{digest.removeprefix('sha256:')}*")
    return installation.plane.kubectl("exec", pod, "-n", NAMESPACE, "--", *find)


async def test_bad_adapters_fail_by_name_beside_good_ones_and_recover(installation: Installation) -> None:
    plane, good = installation.plane, [f"good-{i}" for i in range(20)]
    await asyncio.to_thread(plane.apply, *(adapter_manifest(name, "acme", "file:adapters/upper") for name in good))
    await asyncio.to_thread(installation.wait_ready, *(f"acme/{name}" for name in good))
    cases = [
        Case(f"acme/{name}", c.prompt, c.expect)
        for name, c in zip(good, sure_cases(("acme/upper",), 20, seed=7), strict=True)
    ]
    async with load(installation.url, cases, "beside", width=8) as made:
        manifests = [adapter_manifest(name, "globex", "", source=source, **more) for name, source, more, _ in BAD]
        await asyncio.to_thread(plane.apply, *manifests)
        await eventually(lambda: asyncio.to_thread(named, installation))
        await asyncio.to_thread(
            plane.apply, *(adapter_manifest(name, "globex", "file:adapters/upper") for name in BAD_NAMES)
        )
        await asyncio.to_thread(installation.wait_ready, *(f"globex/{name}" for name in BAD_NAMES))
    assert_undisturbed(made.streams)
    assert not any(reason(installation, name, "acme") != "Published" for name in good)
    names = [f"lora/{name}" for name in good]
    await asyncio.to_thread(plane.kubectl, "delete", "-n", "acme", *names)
    await asyncio.to_thread(plane.kubectl, "delete", "-n", "globex", *(f"lora/{name}" for name in BAD_NAMES))


def named(installation: Installation) -> bool:
    """Every bad adapter tells its reason."""
    return all(reason(installation, name, "globex") == wanted for name, *_, wanted in BAD)


def reason(installation: Installation, name: str, namespace: str) -> str:
    conditions = adapter(installation, name, namespace).get("status", {}).get("conditions", [])
    return next((c["reason"] for c in conditions if c["type"] == "Ready"), "")

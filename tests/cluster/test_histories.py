"""What clients did and saw, recorded and checked, with the real operator: as `weft bench histories` on one machine."""

import asyncio
import itertools
import shutil
import time
from collections.abc import Iterator

import httpx2
import pytest

from harness.installation import Installation
from harness.quickstart import adapter_manifest
from harness.waiting import PATIENCE_S, eventually, wait_until
from weft_devcluster.api import is_so
from weft_trouble.histories import Applied, Deleted, History, Read, SeenReady
from weft_trouble.through_histories import MODEL_DIGEST

TENANT, NAMES, LIVES, CONTENTS, READERS = "acme", ("kept-0", "kept-1"), 2, 3, 4
PAUSE_S = 0.02  # of a client that was answered 404
READS = 40  # of a content that is ready


@pytest.fixture
def gateways(installation: Installation) -> Iterator[list[str]]:
    """Two of them, past the Service."""

    async def scaled(count: int) -> None:
        async def there() -> bool:
            names = [await asyncio.to_thread(of, "gateway") for of in (installation.names, installation.ready)]
            return all(len(found) == count for found in names)

        installation.scale_gateway(count)
        await eventually(there)

    asyncio.run(scaled(2))
    yield [installation.pod_url(pod) for pod in installation.names("gateway")]
    asyncio.run(scaled(1))


async def test_after_ready_no_older_content_answers_and_after_a_deletion_none(
    installation: Installation, gateways: list[str]
) -> None:
    for number in range(len(NAMES) * LIVES * CONTENTS):
        source = installation.sources / "adapters" / f"history-{number}"
        shutil.copytree(installation.sources / "adapters" / "upper", source)
        with (source / "adapter_config.json").open("a") as config:
            config.write("\n" * (number + 1))  # a digest of its own
    installation.publish()
    history, numbers, over = History(), itertools.count(), asyncio.Event()

    async def read(gateway: str, turn: int) -> None:
        async with httpx2.AsyncClient(base_url=gateway, timeout=PATIENCE_S) as client:
            while not over.is_set():
                name, begin = NAMES[turn % len(NAMES)], time.monotonic()
                body = {"model": f"{TENANT}/{name}", "prompt": "the red fox", "max_tokens": 2, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code in (200, 404), answer.text
                history.reads.append(Read(name, begin, time.monotonic(), answer.headers.get(MODEL_DIGEST, "")))
                turn += 1
                await asyncio.sleep(0.0 if answer.status_code == 200 else PAUSE_S)

    async with asyncio.TaskGroup() as readers:
        for gateway in gateways:
            for turn in range(READERS):
                readers.create_task(read(gateway, turn))
        async with asyncio.TaskGroup() as publishers:
            for name in NAMES:
                publishers.create_task(asyncio.to_thread(lives, installation, history, name, numbers))
        over.set()
    answered = sum(bool(one.digest) for one in history.reads)
    print(f"{answered} requests answered, {len(history.reads) - answered} not found")
    assert list(history.check()) == []
    assert len({one.digest for one in history.reads}) > len(NAMES) * LIVES, "they saw contents come, change and go"


def lives(installation: Installation, history: History, name: str, numbers: Iterator[int]) -> None:
    """An adapter is applied, changed and deleted, several times."""
    plane = installation.plane
    for life, content in itertools.product(range(LIVES), range(CONTENTS)):
        begin = time.monotonic()
        plane.apply(adapter_manifest(name, TENANT, f"file:adapters/history-{next(numbers)}"))
        plane.wait_until("lora", name, TENANT, is_so("Ready"), "is ready")
        at, obj = time.monotonic(), plane.get("lora", name, TENANT)
        generation = obj["metadata"]["generation"]
        history.applied.append(Applied(name, life, generation, obj["status"]["digest"], begin))
        history.ready.append(SeenReady(name, life, generation, at))
        seen = len(history.reads)
        wait_until(lambda seen=seen: len(history.reads) >= seen + READS, f"{READS} requests")
        if content == CONTENTS - 1:
            begin = time.monotonic()
            plane.kubectl("delete", "lora", name, "-n", TENANT)
            history.deleted.append(Deleted(name, life, begin, time.monotonic()))

"""60 adapters over 8 slots, the i-th asked for in proportion to 1/i, every one at least once: all are answered."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file, save_file

from harness.quickstart import QUICKSTART, adapter_manifest, copy_manifests
from harness.waiting import eventually
from weft.domain.adapter import Tier
from weft_stage.load import run
from weft_stage.reports import runners
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

COUNT = 60


def generate(folder: Path) -> None:
    """`COUNT` variations of the upper-case adapter: B scaled a little, so that each has a digest of its own."""
    source = QUICKSTART / "adapters" / "upper"
    tensors = load_file(source / "adapter_model.safetensors")
    for i in range(COUNT):
        target = folder / "adapters" / f"a{i}"
        target.mkdir()
        scaled = {k: v * (1 + i * 1e-5) if "lora_B" in k else v for k, v in tensors.items()}
        save_file(scaled, target / "adapter_model.safetensors")
        (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    manifests = [adapter_manifest(f"a{i}", "many", f"file:adapters/a{i}") for i in range(COUNT)]
    (folder / "many.yaml").write_text(yaml.safe_dump_all(manifests))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    manifests = copy_manifests(tmp_path_factory.mktemp("m"))
    generate(manifests)
    with Stack(manifests, tmp_path_factory.mktemp("w")) as made:
        made.wait_for_models()
        yield made


async def test_every_adapter_is_answered_and_the_accounts_balance(many: Stack, rng: random.Random) -> None:
    popular = rng.choices(range(COUNT), weights=[1 / (i + 1) for i in range(COUNT)], k=COUNT)
    order = [*range(COUNT), *popular]
    rng.shuffle(order)
    bodies = [
        {"model": f"many/a{i}", "prompt": f"adapter number {i}", "temperature": 0, "max_tokens": 40} for i in order
    ]
    timings = await run(many.url, bodies, streams=32)
    assert [t.text for t in timings] == [f"ADAPTER NUMBER {i}" for i in order]

    async def idle() -> bool:
        (runner,) = await runners(many.address("supervisor"))
        on_device = [a for a in runner.adapters.values() if a.tier is Tier.DEVICE]
        return (
            runner.figures.free_pages == runner.spec.total_pages
            and len(on_device) <= runner.spec.max_adapters
            and all(a.running == 0 for a in runner.adapters.values())
        )

    await eventually(idle)
    (name,) = many.names("runner")  # an idle engine checks its accounts, and ends the process where they do not balance
    assert many.components()[name]["restarts"] == 0

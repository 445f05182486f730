"""The oracle: transformers + peft in fp32 on the same files (see `random_models`)."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.native_library import native_library
from harness.random_models import OracleModel, Verdict, write_adapters, write_base
from harness.rank_forks import rank_forks
from harness.ranks import base_of, settings_of, staged
from harness.small_runner import World, depot, drive, make_driver, new_world, one_thread, small_config, world  # noqa: F401 (fixtures)
from weft_runner.core import BatchLimits
from weft_runner.executors import make_executor
from weft_runner.parallel import worker_group

# fp32 sums in another order move a logit by ~1e-5 here; a gap between the two best above this cannot be turned round.
TOLERANCE = 1e-3

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"r": 8, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    {"r": 16, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"],
        "layers_to_transform": [1],
    },
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 7, "layers.0.mlp.up_proj": 2},
        "alpha_pattern": {"q_proj": 3, "down_proj": 16},
    },
    {"r": 32, "lora_alpha": 16, "target_modules": r".*\.(v_proj|down_proj)"},
    {"r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "down_proj", "k_proj"]},
)


def pytest_configure(config: pytest.Config) -> None:
    """What peft asks transformers."""
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@dataclass
class Oracle:
    """A base model and its adapters as the engine's tests see them (`world`), and as the oracle does."""

    world: Any
    model: OracleModel

    @property
    def adapters(self) -> list[str]:
        return list(self.model.adapters)

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size

    def logits(self, adapter: str, ids: list[int]) -> torch.Tensor:
        return self.model.logits(adapter, ids)

    def judge(self, adapter: str, prompt: list[int], answer: list[int]) -> Verdict:
        return self.model.judge(adapter, prompt, answer, TOLERANCE)


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Fork the ranks of split models from a process that has imported torch."""
    with rank_forks() as forks, mock.patch.object(worker_group, "start_rank", forks.start_rank):
        yield


@pytest.fixture(scope="session")
def tolerance() -> float:
    return TOLERANCE


@pytest.fixture(scope="session")
def make_oracle(load_oracle_from: Callable[..., Oracle]) -> Callable[..., Oracle]:
    """Write a random base of a family and `ADAPTERS` with transformers and peft themselves, and load them there."""

    def make(root: Path, family: str, seed: int, **config: Any) -> Oracle:
        sizes = {"vocab_size": 131, "intermediate_size": 80, "num_hidden_layers": 3}
        write_base(root / "base", family, seed, **{**sizes, **config})
        return load_oracle_from(root, list(write_adapters(root, ADAPTERS, seed).adapters))

    return make


@pytest.fixture(scope="session")
def load_oracle_from() -> Callable[..., Oracle]:
    """The base in `root / "base"` and the adapters in `root / NAME`."""

    def load(root: Path, names: list[str]) -> Oracle:
        config = json.loads((root / "base" / "config.json").read_text())
        return Oracle(World(root, config), OracleModel(root, tuple(names)))

    return load


@pytest.fixture(params=["reference", "reference in chunks", "cpu", pytest.param("stages", marks=pytest.mark.slow)])
def drive_each(
    request: pytest.FixtureRequest,
    make_driver: Callable[..., Any],  # noqa: F811 (a fixture)
) -> Iterator[Callable[[World], tuple[Any, float]]]:
    """Drive an executor in each way over a world: the driver, and how near it is to transformers."""
    with ExitStack() as stack:
        flags = {"kv_pages": 64, "page_tokens": 16, "max_adapters": 8}

        def make(world: World) -> tuple[Any, float]:
            files = {path.name: path for path in world.base.iterdir()}
            how: dict[str, Any] = {"total_pages": 64, "page_tokens": 16, "max_adapters": 8, "max_sequences": 16}
            match request.param:
                case "cpu":
                    native_library()
                    executor = make_executor(settings_of(**flags, executor="cpu", dtype="fp32"), base_of(files))
                    return make_driver(world, **how, make_executor=lambda *_: executor), 1e-3
                case "stages":
                    executor = stack.enter_context(staged(files, 2, **flags))
                    return make_driver(world, **how, make_executor=lambda *_: executor), 1e-4
                case way:
                    limits = BatchLimits(max_prefills=2, max_batch_tokens=512 if way == "reference" else 20)
                    return make_driver(world, **how, batch=limits), 1e-4

        yield make

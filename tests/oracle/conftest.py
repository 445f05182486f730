"""The oracle: transformers + peft in fp32 on the same files (see `random_models`)."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.random_models import OracleModel, Verdict, write_adapters, write_base
from harness.rank_forks import rank_forks
from harness.small_runner import (  # noqa: F401 (fixtures)
    World,
    depot,
    drive,
    make_driver,
    new_world,
    one_thread,
    small_config,
    world,
)
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


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """The ranks of split models start with torch imported. `test_flying` has some that start as a runner's do."""
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

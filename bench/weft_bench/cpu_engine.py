"""The engine alone, without wire and gateway: the runner's own objects, built as a runner builds them.

What is played through it, and how that is witnessed, is `playing`'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft_runner.errors import RunnerError
from weft_runner.settings import OffloadByHand, RunnerSettings, parse_settings
from weft_runner.shell.engine import Engine, Output
from weft_runner.shell.engine_factory import EngineBundle, build_engine
from weft_stage.errors import EngineRefused
from weft_stage.playing import Ask, Folders, Life, Played, Player

__all__ = ["PAGE_TOKENS", "Ask", "Life", "Played", "Sizes", "Subject", "pages_of", "settings"]
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Offload:
    """Weights on disk in `folder`, under the digest `base`; at most `share` of them stay in `device_bytes`."""

    folder: Path
    base: str
    device_bytes: int
    share: float = 1.0
    batch_tokens: int = 256
    plan: Path | None = None  # as JSON: which weights stay


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine is built for. `executor` and `dtype` as the runner's flags; `threads` 0: chosen by it.

    `adapter_pages`: KV pages beside those of the rows, since adapters take their bytes from the same budget.
    """

    executor: str = "auto"
    dtype: str = "bf16"
    threads: int = 0
    rows: int = 32
    context_tokens: int = 512
    slots: int = 32
    batch_tokens: int = 1024
    prefills: int = 32
    max_rank: int = 64
    adapter_pages: int = 0
    token_time_ms: int = 60_000
    profile: bool = False
    offload: "Offload | None" = None
    stages: int = 1  # of a pipeline
    speculation: str = "off"


class Subject(Player):
    """One engine under measurement, from enter to exit. Raises EngineRefused when it cannot be built."""

    built: EngineBundle

    def __init__(self, files: Mapping[str, Path], sizes: Sizes) -> None:
        self.adapters = Folders()

        def make(told: Callable[[Output], None]) -> Engine:
            self.built = build_engine(settings(sizes), files, self.adapters, told)
            return self.built.engine

        try:
            super().__init__(make)
        except RunnerError as error:
            raise EngineRefused(f"the engine cannot be built: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self.built.close()

    @property
    def executor(self) -> str:
        """What computes, in words: `cpu/amx_bf16/bf16, 2 threads`."""
        return f"{self.built.numerics_class}, {self.built.threads} threads"


def pages_of(sizes: Sizes) -> int:
    """KV pages that rows of this context and the adapters need."""
    return sizes.rows * (-(-sizes.context_tokens // PAGE_TOKENS) + 1) + sizes.adapter_pages


def settings(sizes: Sizes) -> RunnerSettings:
    """The runner's own flags. Addresses are never used: nothing listens."""
    nowhere = "127.0.0.1:1"
    flags = {
        "listen": nowhere, "probes": nowhere, "supervisor": nowhere, "depot": f"http://{nowhere}", "data-dir": ".",
        "pool": "bench/bench", "base-digest": f"sha256:{0:064}", "executor": sizes.executor, "dtype": sizes.dtype,
        "threads": sizes.threads, "kv-pages": pages_of(sizes), "max-sequences": sizes.rows, "max-adapters": sizes.slots,
        "max-batch-tokens": max(sizes.batch_tokens, sizes.rows),
        "max-rank": sizes.max_rank, "token-time-ms": sizes.token_time_ms, "speculation": sizes.speculation,
    }  # fmt: skip
    chosen: dict[str, Any] = {"profile": sizes.profile, "max_prefills": sizes.prefills}
    if (offload := sizes.offload) is not None:
        flags |= {
            "base-digest": offload.base, "offload": f"device={offload.device_bytes},path={offload.folder}",
        }  # fmt: skip
        chosen["by_hand"] = OffloadByHand(
            batch_tokens=offload.batch_tokens, plan=offload.plan, weights_share=offload.share
        )
    if sizes.stages > 1:
        flags["pipeline-parallel"] = sizes.stages
    return parse_settings([word for name, value in flags.items() for word in (f"--{name}", str(value))], **chosen)

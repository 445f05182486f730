"""What the runners do now, as a gateway's page shows it: asked on demand, bounded, of no use for decisions."""

from dataclasses import dataclass
from typing import Annotated

from weft.domain.adapter import Tier
from weft.domain.bounds import MAX_NAME_CHARS, Any32, Any64, Bound, Detail, Listed, PoolName, SomeDigest, Text
from weft.domain.runner import RunnerRole

MAX_LISTED_RUNNERS = 512  # in one answer
MAX_LISTED_ADAPTERS = 4096  # of all runners together; each lists MIN_LISTED at least, if it has as many
MIN_LISTED = 8


@dataclass(frozen=True, slots=True)
class FleetQuery:
    """Ask for the present state of the runners."""


@dataclass(frozen=True, slots=True)
class FleetAdapter:
    """An adapter on a runner: in host memory or on the device, on its way there, or with the error of its last load."""

    digest: SomeDigest
    tier: Tier
    running: Any32 = 0  # sequences
    loading: bool = False
    error: Detail = ""


@dataclass(frozen=True, slots=True)
class FleetRunner:
    """A runner as it reported last. `tokens`: computed since its start, of prompts and of answers."""

    name: Annotated[str, Bound(MAX_NAME_CHARS, 1, "a runner's name")]
    pool: PoolName
    incarnation: Text
    ready: bool
    draining: bool
    role: RunnerRole
    sequences: Any32
    max_sequences: Any32
    best_batch: Any32  # sequences; 0: not measured
    used_pages: Any32  # that hold tokens
    free_pages: Any32
    adapter_pages: Any32
    total_pages: Any32
    page_tokens: Any32
    tokens: Any64
    pending_prompt_tokens: Any32
    adapters: Listed[FleetAdapter] = ()  # those in use first
    adapters_left_out: Any32 = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The runners by pool and name, at most MAX_LISTED_RUNNERS."""

    runners: Annotated[tuple[FleetRunner, ...], Bound(MAX_LISTED_RUNNERS, subject="the number of runners")] = ()
    left_out: Any32 = 0

"""What the runners do now, as a gateway's page shows it: asked on demand, bounded, of no use for decisions."""

from dataclasses import dataclass

from weft.domain.adapter import Tier
from weft.domain.runner import RunnerRole

MAX_RUNNERS = 512  # in one answer
MAX_ADAPTERS = 4096  # of all runners together; each lists MIN_LISTED at least, if it has as many
MIN_LISTED = 8


@dataclass(frozen=True, slots=True)
class FleetQuery:
    """What do the runners do now?"""


@dataclass(frozen=True, slots=True)
class FleetAdapter:
    """An adapter on a runner: in host memory or on the device, on its way there, or with the error of its last load."""

    digest: str
    tier: Tier
    running: int = 0  # sequences
    loading: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class FleetRunner:
    """A runner as it reported last. `tokens`: computed since its start, of prompts and of answers."""

    name: str
    pool: str
    incarnation: str
    ready: bool
    draining: bool
    role: RunnerRole
    sequences: int
    max_sequences: int
    best_batch: int  # sequences; 0: not measured
    used_pages: int  # that hold tokens
    free_pages: int
    adapter_pages: int
    total_pages: int
    page_tokens: int
    tokens: int
    pending_prompt_tokens: int
    adapters: tuple[FleetAdapter, ...] = ()  # those in use first
    adapters_left_out: int = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The runners by pool and name, at most MAX_RUNNERS."""

    runners: tuple[FleetRunner, ...] = ()
    left_out: int = 0

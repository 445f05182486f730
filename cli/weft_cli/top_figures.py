"""The figures of `weft top`: two looks at the runners make rates. Values in, tables out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.domain.runner import OffloadState
from weft_cli.output import short

UNKNOWN = "-"
MAX_SHOWN_ADAPTERS = 10  # shown, by tokens/s
RUNNER_HEADERS = (
    "RUNNER", "POOL", "READY", "BATCH", "TOKENS/S", "FREE PAGES", "ADAPTERS", "ROLE", "PROMPTS", "ACCEPTED",
)  # fmt: skip
POOL_HEADERS = ("POOL", "RUNNERS", "BATCH", "TOKENS/S", "FREE PAGES", "WAITING", "LINES")
OFFLOAD_HEADERS = ("OFFLOADED", "WEIGHTS IN MEMORY", "DISK", "MS A TOKEN", "PREDICTED", "ONE REQUEST ALONE")
ADAPTER_HEADERS = ("ADAPTER", "RUNNING", "TOKENS/S", "RUNNERS")


@dataclass(frozen=True, slots=True)
class SequenceNow:
    """A sequence on a runner; `tokens` of its context are computed."""

    key: tuple[str, int, int]  # request, epoch
    adapter: str  # digest, "" for the base
    tokens: int
    line: bool = False  # of a batch


@dataclass(frozen=True, slots=True)
class RunnerNow:
    """A runner as its supervisor knows it. Counters begin with its start.

    `tokens`: computed, of prompts and of answers. `drafts`: rows of steps that had one; `accepted_tokens`: of those.
    """

    incarnation: tuple[str, str]
    name: str
    pool: str
    ready: bool
    draining: bool
    tokens: int
    free_pages: int
    total_pages: int
    max_sequences: int
    sequences: tuple[SequenceNow, ...] = ()
    on_device: frozenset[str] = frozenset()
    role: str = "mixed"
    pending_prompt_tokens: int = 0
    offload: OffloadState | None = None
    drafts: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GatewayNow:
    """The gateway's figures: present requests, requests without a runner, names of digests.

    `waiting_of`: interactive ones without a runner, by pool where it may be seen.
    """

    in_flight: int
    waiting: int
    waiting_of: Mapping[str, int] = field(default_factory=dict[str, int])
    names: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Look:
    """All figures at one moment; `at` in seconds of one clock."""

    at: float
    runners: tuple[RunnerNow, ...]
    gateway: GatewayNow | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables as text: a line, then rows by table."""

    summary: str
    runners: Sequence[tuple[str, ...]]
    pools: Sequence[tuple[str, ...]]
    adapters: Sequence[tuple[str, ...]]
    offloaded: Sequence[tuple[str, ...]] = ()


def tables_of(previous: Look | None, now: Look) -> Tables:
    """Make the rows of the three tables. Without a look before there is no rate."""
    rates, accepted = _rates(previous, now), _accepted(previous, now)
    measured = [rate for rate in rates.values() if rate is not None]
    total = sum(measured) if measured else None
    return Tables(
        summary=_summary(now, total),
        runners=[
            _runner_row(runner, rates[runner.incarnation], accepted[runner.incarnation]) for runner in now.runners
        ],
        pools=[_pool_row(pool, now, rates) for pool in sorted({runner.pool for runner in now.runners})],
        adapters=list(_adapter_rows(previous, now)),
        offloaded=[_offload_row(one.name, one.offload) for one in now.runners if one.offload is not None],
    )


def _rates(previous: Look | None, now: Look) -> dict[tuple[str, str], float | None]:
    """Compute tokens per second by runner; None for a new runner (a restart counts from 0 again)."""
    earlier = {runner.incarnation: runner.tokens for runner in previous.runners} if previous else {}
    seconds = now.at - previous.at if previous else 0.0
    return {
        runner.incarnation: (runner.tokens - earlier[runner.incarnation]) / seconds
        if runner.incarnation in earlier and seconds > 0
        else None
        for runner in now.runners
    }


def _accepted(previous: Look | None, now: Look) -> dict[tuple[str, str], float | None]:
    """Compute accepted tokens a draft by runner; None for one without drafts since the look before."""
    earlier = {runner.incarnation: runner for runner in previous.runners} if previous else {}
    rates: dict[tuple[str, str], float | None] = {}
    for runner in now.runners:
        earlier_runner = earlier.get(runner.incarnation)
        drafts = runner.drafts - earlier_runner.drafts if earlier_runner else 0
        rates[runner.incarnation] = (
            (runner.accepted_tokens - earlier_runner.accepted_tokens) / drafts if earlier_runner and drafts else None
        )
    return rates


def _summary(now: Look, tokens_per_s: float | None) -> str:
    ready = sum(runner.ready and not runner.draining for runner in now.runners)
    parts = [f"{ready} of {len(now.runners)} runners ready", f"{_rate(tokens_per_s)} tokens/s"]
    if now.gateway:
        parts += [f"{now.gateway.in_flight} requests", f"{now.gateway.waiting} waiting"]
    return ", ".join(parts)


def _runner_row(runner: RunnerNow, rate: float | None, accepted: float | None) -> tuple[str, ...]:
    return (
        runner.name,
        runner.pool,
        "Draining" if runner.draining else str(runner.ready),
        f"{len(runner.sequences)}/{runner.max_sequences}",
        _rate(rate),
        f"{runner.free_pages}/{runner.total_pages}",
        str(len(runner.on_device)),
        runner.role,
        str(runner.pending_prompt_tokens),
        UNKNOWN if accepted is None else f"{accepted:.1f}",
    )


def _offload_row(name: str, state: OffloadState) -> tuple[str, ...]:
    """Make the row of an offload pool's runner. A single request waits for the disk, if most weights are on disk."""
    alone = f"{_ms(state.alone_ms)} ms a token" if state.alone_ms else UNKNOWN
    return (
        name,
        f"{state.resident_share:.0%}",
        f"{state.disk_bytes_per_s / 1e9:.2f} GB/s" if state.disk_bytes_per_s else UNKNOWN,
        _ms(state.measured_ms) if state.measured_ms else UNKNOWN,
        _ms(state.predicted_ms) if state.predicted_ms else UNKNOWN,
        alone + (", the disk's bound" if state.disk_bound else ""),
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _pool_row(pool: str, now: Look, rates: Mapping[tuple[str, str], float | None]) -> tuple[str, ...]:
    pool_runners = [runner for runner in now.runners if runner.pool == pool]
    measured = [rate for runner in pool_runners if (rate := rates[runner.incarnation]) is not None]
    waiting = now.gateway.waiting_of.get(pool) if now.gateway else None
    return (
        pool,
        f"{sum(runner.ready for runner in pool_runners)}/{len(pool_runners)}",
        f"{sum(len(r.sequences) for r in pool_runners)}/{sum(r.max_sequences for r in pool_runners)}",
        _rate(sum(measured) if measured else None),
        f"{sum(runner.free_pages for runner in pool_runners)}/{sum(runner.total_pages for runner in pool_runners)}",
        UNKNOWN if waiting is None else str(waiting),
        str(sum(sequence.line for runner in pool_runners for sequence in runner.sequences)),
    )


def _adapter_rows(previous: Look | None, now: Look) -> Iterator[tuple[str, ...]]:
    """Yield the busiest adapters by running sequences. Sequences that ended between two looks are missing."""
    running = Counter[str](sequence.adapter for runner in now.runners for sequence in runner.sequences)
    resident = Counter[str](digest for runner in now.runners for digest in runner.on_device)
    tokens = _tokens_by_adapter(previous, now) if previous else Counter[str]()
    seconds = now.at - previous.at if previous else 0.0
    names = now.gateway.names if now.gateway else {}
    digests = sorted(running.keys() | resident.keys())
    ranked = sorted(digests, key=lambda digest: (tokens[digest], running[digest]), reverse=True)
    for digest in [digest for digest in ranked if digest][:MAX_SHOWN_ADAPTERS]:
        rate = _rate(tokens[digest] / seconds if seconds > 0 else None)
        yield names.get(digest) or short(digest), str(running[digest]), rate, str(resident[digest])


def _tokens_by_adapter(previous: Look, now: Look) -> Counter[str]:
    """Count the tokens gained by the sequences of each adapter. All tokens of a new sequence count."""
    earlier = {sequence.key: sequence.tokens for runner in previous.runners for sequence in runner.sequences}
    gained = Counter[str]()
    for runner in now.runners:
        for sequence in runner.sequences:
            gained[sequence.adapter] += max(0, sequence.tokens - earlier.get(sequence.key, 0))
    return gained


def _rate(tokens_per_s: float | None) -> str:
    return UNKNOWN if tokens_per_s is None else f"{tokens_per_s:.1f}"

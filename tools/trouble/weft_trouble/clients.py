"""`weft bench clients`: what clients of one gateway notice of crowds that misbehave.

*Others* send streamed requests of 24 tokens at a fixed rate, each at its time; half of the rounds alone, half beside a
crowd, in turn. A ratio is that of a crowd's rounds to those without. The gateway's resident memory is sampled four
times a second while the crowd is there.

- *idle*: connections that have made one request and make no other; the gateway closes each after a minute, and another
  one comes. *slow heads*, *slow bodies*: a byte a second. *stopped readers*: they ask for 900 tokens with log
  probabilities and read no more after the first event; the round begins once the runner has computed them. *flood*: a
  tenant with a limit of one request a minute sends the next one 0.2 s after each refusal, on each of its connections.
- *small requests*, *large bodies*, *long prompts*: a tenant without limits sends one after the other on each of its
  connections; what they ask for is longer than the context, so the gateway alone works for them. A large body has 1.3
  MB and 4,000 messages, a long prompt 0.2 MB (`/tokenize`).
- *scrapes*: `GET /metrics` without a key, again and again. *stored conversations*: eight responses with 10,000 values
  each that no model reads, continued by short requests. *blank lines*: batches with 20 MB of line ends; others' batch
  of one line is timed beside them. *dripping uploads*: adapters that come by a byte a second.

Others also ask for `/healthz` 20 times a second.

Crowd, gateway, runner and benchmark share the cores.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft_stage.lines import Line, Origin, percentile
from weft_stage.sse import Streamed
from weft_trouble.crowds import (
    ATTACKS,
    BLANKS,
    BURSTS,
    CHATS,
    FLOOD,
    IDLE,
    READERS,
    SCRAPES,
    SLOW_BODIES,
    SLOW_HEADS,
    UPLOADS,
)

COUNTS = {
    IDLE: 10_000, SLOW_HEADS: 500, SLOW_BODIES: 500, READERS: 200, FLOOD: 100, **dict.fromkeys(BURSTS, 100),
    SCRAPES: 20, CHATS: 4, BLANKS: 6, UPLOADS: 33,
}  # fmt: skip
OF_MEMORY, OF_P99, OF_REFUSAL = "<= 300", {IDLE: 1.2, READERS: 1.2, FLOOD: 1.5}, "<= 0.1"
PROBE_MS, GROWTH_MB, BATCH_S = "<= 50", "<= 100", "<= 2"  # beside ATTACKS and slow heads
TOKENS = 24


@dataclass(frozen=True, slots=True)
class Found:
    """What one crowd did: answers to others without and beside it, the gateway's memory, and what the crowd saw."""

    crowd: str
    count: int
    alone: Sequence[Streamed]
    beside: Sequence[Streamed]
    probes_s: tuple[Sequence[float], Sequence[float]]  # times of /healthz, without and beside it
    resident_mb: float  # before it
    most_resident_mb: float
    batch_s: float  # of others' batch of one line; 0: not measured
    cut_off_s: float  # until the gateway had closed the last of them; 0: it does not
    seen: Mapping[str, int]
    gateway_cpu_s: tuple[float, float]  # without and beside it


def lines(origin: Origin, found: Found) -> Iterator[Line]:
    """Yield the figures of one crowd."""
    case = f"{found.count:,} {found.crowd}"
    for metric, of in (("first token", _first), ("whole answer", _whole)):
        for percent in (50, 99):
            alone, beside = (percentile(of(answers), percent) * 1e3 for answers in (found.alone, found.beside))
            most = OF_P99.get(found.crowd, 0.0) * alone if percent == 99 else 0.0
            target = f"<= {most:.1f}" if most else None
            yield origin.line(case, f"others' {metric} p{percent}", beside, "ms", baseline=alone, target=target)
    attack = found.crowd in (*ATTACKS, SLOW_HEADS)
    probe_alone_ms, probe_ms = (1e3 * percentile(seconds, 99) for seconds in found.probes_s)
    target = PROBE_MS if attack else None
    yield origin.line(case, "others' /healthz p99", probe_ms, "ms", baseline=probe_alone_ms, target=target)
    yield origin.line(case, "gateway, most resident", found.most_resident_mb, "MB", target=OF_MEMORY)
    growth_mb = found.most_resident_mb - found.resident_mb
    yield origin.line(case, "gateway, grown by", growth_mb, "MB", target=GROWTH_MB if attack else None)
    if found.batch_s:
        yield origin.line(case, "others' batch of one line", found.batch_s, "s", target=BATCH_S)
    if found.cut_off_s:
        yield origin.line(case, "cut off after", found.cut_off_s, "s")
    if refusals := found.seen.get("status 429", 0):
        alone_s, beside_s = found.gateway_cpu_s
        yield origin.line(
            case, "gateway, CPU a refusal", 1e3 * (beside_s - alone_s) / refusals, "ms", target=OF_REFUSAL
        )  # fmt: skip
    for what, count in sorted(found.seen.items()):
        yield origin.line(case, f"of the crowd: {what}", count, "times")


def _first(answers: Sequence[Streamed]) -> list[float]:
    return [answer.first - answer.start for answer in answers]


def _whole(answers: Sequence[Streamed]) -> list[float]:
    return [answer.end - answer.start for answer in answers]

"""What clients saw in a run, printed and drawn for people."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft_sim.laws import COMPLETE, ClientRequest

QUANTILES = (0.5, 0.9, 0.99)
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request; times in ms. `tpot_ms`: between tokens after the first; None for a single token."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    tokens: int
    tenant: str = ""


@dataclass(frozen=True)
class Figures:
    """A run. `utilization`: the share of the time in which each runner computed."""

    served: tuple[Served, ...]
    failures: dict[str, int]
    seconds: float
    utilization: dict[str, float]
    rows: float  # mean batch
    gaps_s: Sequence[float] = ()  # between two tokens of an answer, of all answers
    roles: Mapping[str, Sequence[tuple[float, str]]] = field(default_factory=dict[str, Sequence[tuple[float, str]]])

    @property
    def tokens_per_s(self) -> float:
        return sum(request.tokens for request in self.served) / self.seconds if self.seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.served) / self.seconds if self.seconds else 0.0


def served(requests: Iterable[ClientRequest]) -> tuple[Served, ...]:
    """Return the clients' view of all completely answered requests."""
    found: list[Served] = []
    for request in requests:
        if request.finish in COMPLETE and request.ended_at is not None:
            first = request.first_at if request.first_at is not None else request.ended_at
            tokens = len(request.text) // 2
            interval_ms = (request.ended_at - first) * 1e3 / (tokens - 1) if tokens > 1 else None
            ttft, e2e = (first - request.arrived) * 1e3, (request.ended_at - request.arrived) * 1e3
            found.append(Served(ttft, interval_ms, e2e, tokens, request.namespace))
    return tuple(found)


def quantile(values: Sequence[float], level: float) -> float:
    """Return a quantile, linear between the two nearest ranks, as numpy's."""
    ordered = sorted(values)
    place = level * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def lines(figures: Figures) -> list[str]:
    """Return the report as `weft sim` prints it."""
    total = len(figures.served) + sum(figures.failures.values())
    out = [
        f"{len(figures.served)} of {total} requests answered in {figures.seconds:.1f} simulated seconds: "
        f"{figures.requests_per_s:.2f} requests/s, {figures.tokens_per_s:.1f} tokens/s, mean batch {figures.rows:.1f}"
    ]
    out += [f"  {count} failed: {reason}" for reason, count in sorted(figures.failures.items())]
    if not figures.served:
        return out
    out += ["", f"{'':<20} {'mean':>9} " + " ".join(f"{f'p{level * 100:g}':>9}" for level in QUANTILES)]
    for name, values in (
        ("TTFT, ms", [request.ttft_ms for request in figures.served]),
        ("time per token, ms", [request.tpot_ms for request in figures.served if request.tpot_ms is not None]),
        ("TBT, ms", [1e3 * gap for gap in figures.gaps_s]),
        ("end to end, ms", [request.e2e_ms for request in figures.served]),
    ):
        if values:
            row = " ".join(f"{quantile(values, level):>9.1f}" for level in QUANTILES)
            out.append(f"{name:<20} {sum(values) / len(values):>9.1f} {row}  {histogram(values)}")
    out += ["", "utilization"]
    changed = any(len(roles) > 1 for roles in figures.roles.values())
    if changed:
        out[-1] += "; roles over time: P prompt, T token, M mixed"
    for name, share in figures.utilization.items():
        row = f"  {name:<20} {share:>6.1%}  {bar(share):<30}"
        out.append(f"{row}  {timeline(figures.roles[name], figures.seconds)}" if changed else row.rstrip())
    return out


def timeline(roles: Sequence[tuple[float, str]], seconds: float, width: int = 40) -> str:
    """Return the role in each part of a run, by its first letter."""
    ends = [(index + 1) * seconds / width for index in range(width)]
    return "".join(next((role for at, role in reversed(roles) if at < end), " ")[0].upper() for end in ends)


def histogram(values: Sequence[float], width: int = 30) -> str:
    """Draw how values are spread between the least and p99, as one line of bars."""
    minimum, p99 = min(values), quantile(values, 0.99)
    if p99 <= minimum:
        return ""
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int((value - minimum) / (p99 - minimum) * width))] += 1
    highest = max(counts)
    drawn = "".join(BARS[-(-count * (len(BARS) - 1) // highest)] for count in counts)
    return f"{minimum:.0f} |{drawn}| {p99:.0f}"


def bar(share: float, width: int = 30) -> str:
    return "█" * round(min(share, 1.0) * width)

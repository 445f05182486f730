"""What a request waits for before its first token, by what the engine did for it. Pure.

Queueing, until its adapter had a slot and the one loader had done what came before; the load; and the rest, which is
prefill and its place in the batch. A request whose adapter sat in a slot when it came is a hit, and has only the rest.
The first request of each stream is left out: they come at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft_stage.cpu_witness import SlotLoad
from weft_stage.lines import percentile
from weft_stage.playing import Life, Played


@dataclass(frozen=True, slots=True)
class Parts:
    """A time to first token, in the order of what was waited for; seconds."""

    queue_s: float
    load_s: float
    rest_s: float
    hit: bool

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.load_s + self.rest_s


def parts(life: Life, loads: Sequence[SlotLoad]) -> Parts:
    """A request's time to first token, by the load that it waited for; `loads` of its own adapter, oldest first."""
    for load in loads:
        if life.posted < load.seated <= life.first:
            begun = max(load.seated - load.seconds, life.posted)  # on its way already: somebody else had asked
            return Parts(begun - life.posted, load.seated - begun, life.first - load.seated, hit=False)
    return Parts(0.0, 0.0, life.ttft_s, hit=True)


def settled(played: Played, loads: Sequence[SlotLoad], streams: int) -> list[Parts]:
    """The parts of every request but the first of each stream, which come all at once."""
    mine: dict[str, list[SlotLoad]] = {}
    for load in loads:
        mine.setdefault(load.digest, []).append(load)
    return [parts(life, mine.get(life.ask.adapter, ())) for life in played.lives[streams:]]


def over_allowed(found: Sequence[Parts], warm_s: Sequence[float], loads: Sequence[SlotLoad]) -> float:
    """The p99 of what is waited for beside queueing, as a multiple of a warm p99 and one load's p99."""
    one_load_s = percentile([load.seconds for load in loads] or [0.0], 99)
    return percentile([part.ttft_s - part.queue_s for part in found], 99) / (percentile(warm_s, 99) + one_load_s)

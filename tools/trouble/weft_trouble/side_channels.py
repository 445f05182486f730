"""`weft bench side-channels`: what a tenant can learn from the time of its own requests.

Two kinds of requests, in turn; *quicker* is the kind that would be answered sooner if its secret could be seen. *AUC*,
the area under the ROC curve, is the share of pairs in which the other kind took longer (Mann and Whitney): 0.5, nothing
can be learned; 1, one request is enough. With 400 of each kind chance alone gives 0.46 to 0.54 in 95 of 100 runs.

- *own prompt again*: a long prompt that the same tenant has just sent, beside new ones: that the prefix cache can be
  seen at all. *another tenant's prompt*: the same, sent by another tenant a moment before.
- *another tenant's adapter*: a model's name that another namespace has, and one that nobody has; both are 404.
- *beginning of a key*: a key with the first half of one that exists, and a random one; both are 401.
- *load*: one's own requests while another tenant has no stream, and while it has 8. Stated, not closed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft_stage.lines import Line, Origin

OWN, FOREIGN, NAME, KEY, LOAD = (
    "own prompt again",
    "another tenant's prompt",
    "another tenant's adapter",
    "beginning of a key",
    "load",
)
CLOSED = (FOREIGN, NAME, KEY)
OF_CLOSED = "<= 0.56"


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of both kinds of requests."""

    what: str
    quicker: Sequence[float]  # if there is anything to see
    slower: Sequence[float]


def auc(quicker: Sequence[float], slower: Sequence[float]) -> float:
    """The share of pairs in which the second took longer; equal ones count half."""
    ranked = sorted([(value, 0) for value in quicker] + [(value, 1) for value in slower])
    at, wins = 0, 0.0
    before = 0  # quicker ones below
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        of_slower = sum(kind for _, kind in ranked[at:end])
        of_quicker = end - at - of_slower
        wins += of_slower * (before + of_quicker / 2)
        before += of_quicker
        at = end
    return wins / (len(quicker) * len(slower))


def lines(origin: Origin, timed: Timed) -> Iterator[Line]:
    """The figures of one secret."""
    share = auc(timed.quicker, timed.slower)
    for kind, values in (("quicker", timed.quicker), ("slower", timed.slower)):
        yield origin.line(timed.what, f"p50 {kind}", sorted(values)[len(values) // 2] * 1e3, "ms")
    target = OF_CLOSED if timed.what in CLOSED else None
    yield origin.line(timed.what, "AUC", max(share, 1 - share), "share", target=target)

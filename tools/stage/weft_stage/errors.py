"""What stops a benchmark, told to the person who started it.

BenchFailed
|- BadOption      an option that does not fit the others
|- StackFailed    a process of ours ended, or did not get ready (stack.py)
|- NoResources    the API server does not know our resources
|- NotInTime      objects did not come to what was waited for
|- NotLogged      the audit log is not that of this API server
|- EngineRefused  the engine could not be built, or gave a request up (playing.py)
|- WrongAdapter   a row ran with another adapter than it asked for: no figure of that run counts
|- RequestFailed  a request through the stack was refused, or its stream broke off (load.py, sse.py)
|- NoGroup        no memory control group can be made (memory_group.py)
|- NotCheckout    a folder has no checkout of Weft (turns.py)
`- PeerFailed     a peer's process ended, or answered something else (peers/worker.py)
"""


class BenchFailed(RuntimeError):
    """The message says what happened and, if it can be known, what to do."""


class BadOption(BenchFailed):
    """An option that does not fit; the message names the option, what it has to be, and the remedy."""

    def __init__(self, option: str, expected: str, given: str, remedy: str = "") -> None:
        super().__init__(f"{option}: expected {expected}, got {given!r}{'; ' if remedy else ''}{remedy}")


class StackFailed(BenchFailed):
    """A process of ours ended, or something did not happen in time; the message holds what it said."""


class NoResources(BenchFailed):
    """The API server does not know our resources."""


class NotInTime(BenchFailed):
    """Objects did not come to what was waited for; the message names some."""


class NotLogged(BenchFailed):
    """A write of our own does not appear in the audit log: it is another server's, or leaves these writes out."""


class EngineRefused(BenchFailed):
    """The engine could not be built, or gave a request up; the message holds its reason."""


class WrongAdapter(BenchFailed):
    """A row ran with another adapter than it asked for, or a step had another number of them than its case says."""


class RequestFailed(BenchFailed):
    """A request did not end as it should; the message holds what came instead."""


class PeerFailed(BenchFailed):
    """A peer's process ended, did not answer in time, or answered something else; the message holds what it said."""


class NoGroup(BenchFailed):
    """No memory control group can be made, or it bounds nothing."""


class NotCheckout(BenchFailed):
    """A folder that has no checkout of Weft; the message names what is missing."""


class OutOfTime(BenchFailed):
    """The seconds that were given are over; what was measured is kept."""

"""What stops a benchmark, told to the person who started it.

BenchFailed
|- StackFailed    a process of ours ended, or did not get ready (stack.py)
|- NoResources    the API server does not know our resources
|- NotInTime      objects did not come to what was waited for
`- NotLogged      the audit log is not that of this API server
"""


class BenchFailed(RuntimeError):
    """The message says what happened and, where it can be known, what to do."""


class StackFailed(BenchFailed):
    """A process of ours ended, or something did not happen in time; the message holds what it said."""


class NoResources(BenchFailed):
    """The API server does not know our resources."""


class NotInTime(BenchFailed):
    """Objects did not come to what was waited for; the message names some."""


class NotLogged(BenchFailed):
    """A write of our own does not appear in the audit log: it is another server's, or leaves these writes out."""

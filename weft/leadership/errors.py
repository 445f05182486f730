"""What can go wrong with a Lease.

LeadershipError
├── LeadershipLost     another process leads, or may lead by now: this one must not act any more and ends
├── LeaseChanged       a write met another version of the Lease, or none: read it again
└── LeaseUnavailable   the API server refused or did not answer; whether a write was carried out is not known
"""


class LeadershipError(Exception):
    """Root of the package's errors."""


class LeadershipLost(LeadershipError):
    """The Lease is not this process's any more, or not for certain."""


class LeaseChanged(LeadershipError):
    """The Lease has another version than the write was made from, or is gone, or one that was to be made is there."""


class LeaseUnavailable(LeadershipError):
    """The API server did not answer, or refused. `status` is the HTTP status; None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

"""The errors of the scheduler's shell; its core answers every event and raises for its own mistakes only.

TermNotDurable          the data directory cannot hold the term: no order may be given, the process ends
PeerError (weft.wire)   a peer sent what its contract does not allow: its stream ends with INVALID_ARGUMENT
+-- SupersededRegistry  a registry has a term below the highest received: its stream ends, FAILED_PRECONDITION
"""

import grpc

from weft.wire.errors import PeerError


class TermNotDurable(Exception):
    """The term could not be written."""


class SupersededRegistry(PeerError):
    """A registry sent a message after a newer registry began to lead."""

    code = grpc.StatusCode.FAILED_PRECONDITION

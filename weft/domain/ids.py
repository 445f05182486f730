"""The identities that every core orders things by: who owns a request, and which process a runner is.

Named tuples, not dataclasses: both are dictionary keys on hot paths, if a tuple's hash is several times faster.
"""

from typing import Annotated, NamedTuple

from weft.domain.bounds import Any64, Bound

MAX_TERM = 2**32 - 1  # a term is the upper half of 64-bit versions
Term = Annotated[int, Bound(MAX_TERM - 1, subject="a term")]  # there has to be one above every term that a peer names
BASE = ""  # the adapter digest of a request for the base model itself


class Epoch(NamedTuple):
    """One ownership of a request by a runner, ordered by (term, counter). (0, 0), NEVER, means never assigned."""

    term: Term = 0
    counter: Any64 = 0


NEVER = Epoch()


class RunnerId(NamedTuple):
    """A runner process: `uuid` lives as long as its data directory, `incarnation` is drawn at each start.

    A new incarnation of a uuid ends the sequences of the one before.
    """

    uuid: Annotated[str, Bound(128, 1, "a runner's uuid")]
    incarnation: Annotated[str, Bound(128, 1, "a runner's incarnation")]

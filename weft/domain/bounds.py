"""Bounds of values from another process. Generous: bounds keep out nonsense, not large users.

An annotation of each field that travels: `weft.wire.codec` refuses what is beyond it, by name.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeVar

T = TypeVar("T")

MAX_NAME_CHARS = 320  # of a name, an id, "namespace/name" or an address
MAX_MODEL_CHARS = 1_000  # of a served model's name
MAX_DETAIL_CHARS = 1_000  # of a reason: it goes into statuses and logs. Longer ones are cut
MAX_REQUEST_TOKENS = 1 << 31  # in one request
MAX_WAITED_MS = 1 << 40  # 35 years
MAX_PAGES = 1 << 31
MAX_RANK = 1 << 16
MAX_CAPACITY = 1 << 16  # sequences, slots, tokens of a page
MAX_MIGRATIONS = 1 << 16
MAX_RUNNERS = 1 << 20  # of a pool


class Bound(NamedTuple):
    """The bound of a number as the contract carries it, of a text's or bytes' length, of the elements of a list or map.

    `subject`: for refusals; "": the field's name. `cut`: what is longer loses its end instead.
    """

    maximum: int
    minimum: int = 0
    subject: str = ""
    cut: bool = False


LISTED = Bound((1 << 32) - 1)  # of a list that the size of its message bounds
Listed = Annotated[tuple[T, ...], LISTED]
ListedOf = Annotated[Sequence[T], LISTED]
FLAT = object()  # annotates a field whose own fields stand in the message itself

Any32 = Annotated[int, Bound((1 << 32) - 1)]
Any64 = Annotated[int, Bound((1 << 64) - 1)]
AnySigned = Annotated[int, Bound((1 << 63) - 1, -1 << 63)]
Tokens = Annotated[int, Bound(MAX_REQUEST_TOKENS)]
Pages = Annotated[int, Bound(MAX_PAGES)]
Capacity = Annotated[int, Bound(MAX_CAPACITY)]
SomeCapacity = Annotated[int, Bound(MAX_CAPACITY, 1)]
Rank = Annotated[int, Bound(MAX_RANK, subject="an adapter's rank")]
Migrations = Annotated[int, Bound(MAX_MIGRATIONS)]
Runners = Annotated[int, Bound(MAX_RUNNERS)]
Milliseconds = Annotated[int, Bound(MAX_WAITED_MS)]
Seconds = Annotated[float, Bound(MAX_WAITED_MS)]  # milliseconds in the contract

Text = Annotated[str, Bound(MAX_NAME_CHARS)]
Name = Annotated[str, Bound(MAX_NAME_CHARS, 1)]  # not empty
Detail = Annotated[str, Bound(MAX_DETAIL_CHARS, cut=True)]
RequestId = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a request id")]
PoolName = Annotated[str, Bound(MAX_NAME_CHARS, subject="a pool's name")]
Namespace = Annotated[str, Bound(MAX_NAME_CHARS, subject="a namespace")]
ModelName = Annotated[str, Bound(MAX_MODEL_CHARS, subject="a model's name")]
Digest = Annotated[str, Bound(MAX_NAME_CHARS, subject="an adapter's digest")]  # "": of the base
SomeDigest = Annotated[str, Bound(MAX_NAME_CHARS, 1, "an adapter's digest")]
Trace = Annotated[str, Bound(MAX_NAME_CHARS, subject="a trace context")]  # W3C's; "": not sampled
Numerics = Annotated[str, Bound(MAX_DETAIL_CHARS, subject="a numerics class")]
EosTokens = Annotated[tuple[Any32, ...], Bound(16, subject="the number of ends of sequence")]

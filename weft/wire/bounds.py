"""What a runner may say of itself: each value is bounded where it is decoded.

What runs in a runner is its pool's owner's choice (SECURITY.md), and its figures are divided by, summed and sent on.
"""

from weft.domain.text import quoted
from weft.identities import MAX_TERM
from weft.wire.errors import PeerError
from weft.wire.v1.common_pb2 import Epoch
from weft.wire.v1.supervisor_pb2 import RunnerHello, RunnerState

CAPACITIES = {
    "page_tokens": 1 << 16,
    "total_pages": 1 << 31,
    "max_sequences": 1 << 16,
    "max_adapters": 1 << 16,
    "max_rank": 1 << 16,
    "max_context_tokens": 1 << 31,
}
TEXTS = {"address": 300, "pool": 320, "base_digest": 200, "numerics_class": 500, "name": 253}
MAX_ID = 128
MAX_STATE_BYTES = 16 << 20  # ten thousand adapters with a long error each; a gRPC message takes 64 MiB


def check_hello(hello: RunnerHello) -> None:
    """Raises PeerError."""
    for what, text in (("uuid", hello.runner.uuid), ("incarnation", hello.runner.incarnation)):
        if not 0 < len(text) <= MAX_ID:
            raise PeerError(f"a runner's {what} has 1 to {MAX_ID} characters, not {len(text)}")
    who = f"runner {quoted(hello.runner.uuid)}"
    if not (hello.pool and hello.address):
        raise PeerError(f"{who}: pool and address are needed")
    for name, most in TEXTS.items():
        if len(getattr(hello, name)) > most:
            raise PeerError(f"{who}: {name} has more than {most} characters")
    for name, most in CAPACITIES.items():
        if not 0 < (value := getattr(hello, name)) <= most:
            raise PeerError(f"{who}: {name} is {value}, not within 1..{most}")
    if hello.max_context_tokens > hello.total_pages * hello.page_tokens:
        raise PeerError(f"{who}: max_context_tokens {hello.max_context_tokens} are more than its pages hold")


def check_state(state: RunnerState, hello: RunnerHello) -> None:
    """A state of the runner that said `hello`. Raises PeerError."""
    who = f"state of runner {quoted(hello.runner.uuid)}"
    if (size := state.ByteSize()) > MAX_STATE_BYTES:
        raise PeerError(f"{who}: {size} bytes are more than {MAX_STATE_BYTES}")
    for name in ("free_pages", "used_pages", "adapter_pages"):
        if (pages := getattr(state, name)) > hello.total_pages:
            raise PeerError(f"{who}: {name} is {pages}, of {hello.total_pages} pages in all")
    if len(state.sequences) > hello.max_sequences:
        raise PeerError(f"{who}: {len(state.sequences)} sequences are more than max_sequences {hello.max_sequences}")
    ids = {sequence.request_id for sequence in state.sequences}
    if len(ids) < len(state.sequences) or "" in ids:
        raise PeerError(f"{who}: each sequence has a request id of its own")
    check_term(max((sequence.epoch.term for sequence in state.sequences), default=0))


def check_epoch(epoch: Epoch) -> None:
    """Raises PeerError."""
    check_term(epoch.term)


def check_term(term: int) -> None:
    """A term that somebody else has seen: there has to be one above it. Raises PeerError."""
    if term >= MAX_TERM:
        raise PeerError(f"term {term} is not below {MAX_TERM}")

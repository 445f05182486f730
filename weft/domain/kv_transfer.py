"""KV of sequences on its way from one runner to another of the same pool (Splitwise, section 4.4).

sender --KvHello, KvOffer, pages, KvComplete--> receiver --KvReady, KvAccept, KvRefuse, KvAck--> sender

The pages themselves are no messages of a machine: the sender's orders its shell to send some (`SendKv`), and the
receiver's tells its shell where they go (`ReceiveKv`). They arrive before the KvComplete that follows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from weft.domain.bounds import MAX_NAME_CHARS, Any32, Bound, Detail, Digest, ListedOf, Pages, RequestId, Text, Tokens
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class KvHello:
    """First message of a sender. `incarnation`: expected of the receiver. `kv_layout`: what a page of KV holds."""

    runner: RunnerId
    incarnation: Text
    pool: Text
    base_digest: Text
    kv_layout: Text


@dataclass(frozen=True, slots=True)
class KvReady:
    """The receiver's answer to a hello. `shard_addresses`: where its ranks from 1 on take their pages."""

    runner: RunnerId
    shard_addresses: Annotated[
        Sequence[Annotated[str, Bound(MAX_NAME_CHARS, 1, "the address of a rank")]],
        Bound(1 << 10, subject="the number of ranks"),
    ] = ()


@dataclass(frozen=True, slots=True)
class KvOffer:
    """KV of that epoch will come, as soon as the sender has it. `adapter`: that computes it."""

    request_id: RequestId
    epoch: Epoch
    adapter: Digest


@dataclass(frozen=True, slots=True)
class KvAccept:
    """Accept pages from this page on. Earlier pages are present already."""

    request_id: RequestId
    epoch: Epoch
    first_page: Pages


@dataclass(frozen=True, slots=True)
class KvRefuse:
    """Refuse all KV of this epoch, with a reason."""

    request_id: RequestId
    epoch: Epoch
    reason: Detail


@dataclass(frozen=True, slots=True)
class KvComplete:
    """Every page of the first `in_kv` tokens was sent.

    `tokens`: those of the answer that the receiver does not know from its Start, with their `logprobs` where it asks
    for them; the last one is not in KV. `cached_tokens`: of the prompt, that the sender reused.
    """

    request_id: RequestId
    epoch: Epoch
    in_kv: Tokens
    tokens: ListedOf[Any32] = ()
    logprobs: Sequence[TokenLogprob] = ()
    cached_tokens: Tokens = 0


@dataclass(frozen=True, slots=True)
class KvAck:
    """The sequence runs from the receiver's pages: the sender's are free."""

    request_id: RequestId
    epoch: Epoch

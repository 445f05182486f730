"""Runner <-> runner: KV of sequences, one stream for each pair and direction."""

from typing import Annotated, NamedTuple

from weft.domain.bounds import Bound, Pages, RequestId
from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvHello, KvOffer, KvReady, KvRefuse
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import Pair
from weft.wire.codec.session import LOGPROBS
from weft.wire.errors import PeerError
from weft.wire.v1 import kv_transfer_pb2 as pb

MAX_PAGES, MAX_LAYERS, MAX_BYTES = 1 << 31, 1 << 12, 1 << 40  # of one message


class KvPages(NamedTuple):
    """Announces that layers [first_layer, first_layer + layers) of pages [first_page, first_page + pages) of a sequence
    follow.

    They come page by page, `bytes` in all. A message of the shells, which alone see the bytes.
    """

    request_id: RequestId
    epoch: Epoch
    first_page: Pages
    pages: Annotated[int, Bound(MAX_PAGES, 1)]
    first_layer: Annotated[int, Bound(MAX_LAYERS)]
    layers: Annotated[int, Bound(MAX_LAYERS, 1)]
    bytes: Annotated[int, Bound(MAX_BYTES, 1)]


def _check_complete(complete: KvComplete) -> None:
    if complete.logprobs and len(complete.logprobs) != len(complete.tokens):
        raise PeerError(
            f"{len(complete.tokens)} tokens with {len(complete.logprobs)} log probabilities, expected one each"
        )


SenderMessage = KvHello | KvOffer | KvPages | KvComplete
KV_FROM_SENDER: Direction[pb.KvFromSender, SenderMessage] = Direction(
    pb.KvFromSender,
    "runner",
    hello=KvHello,
    offer=KvOffer,
    pages=KvPages,
    complete=Pair(KvComplete, pb.KvComplete, custom={"logprobs": LOGPROBS}, check=_check_complete),
)
ReceiverMessage = KvReady | KvAccept | KvRefuse | KvAck
KV_FROM_RECEIVER: Direction[pb.KvFromReceiver, ReceiverMessage] = Direction(
    pb.KvFromReceiver, "runner", ready=KvReady, accept=KvAccept, refuse=KvRefuse, ack=KvAck
)

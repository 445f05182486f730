"""Runner <-> runner: KV of sequences, one stream for each pair and direction."""

from typing import Any, NamedTuple

from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvHello, KvOffer, KvReady, KvRefuse
from weft.wire.codec.direction import Direction, Entry
from weft.wire.codec.session import fill_logprobs, read_logprobs
from weft.wire.codec.values import (
    MAX_DETAIL,
    MAX_PAGES,
    MAX_TOKENS,
    epoch,
    fill_epoch,
    fill_runner_id,
    named,
    number,
    runner_id,
    text,
    texts,
)
from weft.wire.errors import PeerError
from weft.wire.v1 import kv_transfer_pb2 as pb

MAX_RANKS = 1 << 10  # of a runner
MAX_LAYERS = 1 << 12
MAX_BYTES = 1 << 40  # of one message's pages


class KvPages(NamedTuple):
    """Layers [first_layer, first_layer + layers) of pages [first_page, first_page + pages) of a sequence follow.

    Page by page, so many bytes in all. A message of the shells, which alone see the bytes.
    """

    request_id: str
    epoch: Epoch
    first_page: int
    pages: int
    first_layer: int
    layers: int
    bytes: int


def _fill_hello(hello: KvHello, m: pb.KvHello) -> None:
    fill_runner_id(hello.runner, m.runner)
    m.incarnation, m.pool = hello.incarnation, hello.pool
    m.base_digest, m.kv_layout = hello.base_digest, hello.kv_layout


def _hello(m: pb.KvHello) -> KvHello:
    return KvHello(
        runner_id(m.runner),
        text(m.incarnation, "an incarnation"),
        text(m.pool, "a pool's name"),
        text(m.base_digest, "a base digest"),
        text(m.kv_layout, "a KV layout"),
    )


def _fill_ready(ready: KvReady, m: pb.KvReady) -> None:
    fill_runner_id(ready.runner, m.runner)
    m.shard_addresses.extend(ready.shard_addresses)


def _ready(m: pb.KvReady) -> KvReady:
    number(len(m.shard_addresses), "the number of ranks", MAX_RANKS)
    return KvReady(runner_id(m.runner), texts(m.shard_addresses, "the address of a rank"))


def _of_epoch(request_id: str, of: Epoch, m: Any) -> None:
    m.request_id = request_id
    fill_epoch(of, m.epoch)


def _fill_offer(offer: KvOffer, m: pb.KvOffer) -> None:
    _of_epoch(offer.request_id, offer.epoch, m)
    m.adapter = offer.adapter


def _offer(m: pb.KvOffer) -> KvOffer:
    return KvOffer(named(m.request_id, "a request id"), epoch(m.epoch), text(m.adapter, "an adapter's digest"))


def _fill_accept(accept: KvAccept, m: pb.KvAccept) -> None:
    _of_epoch(accept.request_id, accept.epoch, m)
    m.first_page = accept.first_page


def _accept(m: pb.KvAccept) -> KvAccept:
    return KvAccept(named(m.request_id, "a request id"), epoch(m.epoch), number(m.first_page, "first_page", MAX_PAGES))


def _fill_refuse(refuse: KvRefuse, m: pb.KvRefuse) -> None:
    _of_epoch(refuse.request_id, refuse.epoch, m)
    m.reason = refuse.reason[:MAX_DETAIL]


def _refuse(m: pb.KvRefuse) -> KvRefuse:
    return KvRefuse(named(m.request_id, "a request id"), epoch(m.epoch), m.reason[:MAX_DETAIL])


def _fill_ack(ack: KvAck, m: pb.KvAck) -> None:
    _of_epoch(ack.request_id, ack.epoch, m)


def _ack(m: pb.KvAck) -> KvAck:
    return KvAck(named(m.request_id, "a request id"), epoch(m.epoch))


def _fill_pages(pages: KvPages, m: pb.KvPages) -> None:
    _of_epoch(pages.request_id, pages.epoch, m)
    m.first_page, m.pages = pages.first_page, pages.pages
    m.first_layer, m.layers, m.bytes = pages.first_layer, pages.layers, pages.bytes


def _pages(m: pb.KvPages) -> KvPages:
    return KvPages(
        named(m.request_id, "a request id"),
        epoch(m.epoch),
        number(m.first_page, "first_page", MAX_PAGES),
        number(m.pages, "pages", MAX_PAGES, least=1),
        number(m.first_layer, "first_layer", MAX_LAYERS),
        number(m.layers, "layers", MAX_LAYERS, least=1),
        number(m.bytes, "bytes", MAX_BYTES, least=1),
    )


def _fill_complete(complete: KvComplete, m: pb.KvComplete) -> None:
    _of_epoch(complete.request_id, complete.epoch, m)
    m.in_kv = complete.in_kv
    m.tokens.extend(complete.tokens)
    if complete.logprobs:
        fill_logprobs(complete.logprobs, m.logprobs)


def _complete(m: pb.KvComplete) -> KvComplete:
    if m.HasField("logprobs") and len(m.logprobs.tokens) != len(m.tokens):
        raise PeerError(f"{len(m.tokens)} tokens with {len(m.logprobs.tokens)} log probabilities")
    return KvComplete(
        named(m.request_id, "a request id"),
        epoch(m.epoch),
        number(m.in_kv, "in_kv", MAX_TOKENS),
        tuple(m.tokens),
        tuple(read_logprobs(m.logprobs)),
    )


SenderMessage = KvHello | KvOffer | KvPages | KvComplete
KV_FROM_SENDER: Direction[pb.KvFromSender, SenderMessage] = Direction(
    pb.KvFromSender,
    "runner",
    Entry("hello", KvHello, _fill_hello, _hello),
    Entry("offer", KvOffer, _fill_offer, _offer),
    Entry("pages", KvPages, _fill_pages, _pages),
    Entry("complete", KvComplete, _fill_complete, _complete),
)
ReceiverMessage = KvReady | KvAccept | KvRefuse | KvAck
KV_FROM_RECEIVER: Direction[pb.KvFromReceiver, ReceiverMessage] = Direction(
    pb.KvFromReceiver,
    "runner",
    Entry("ready", KvReady, _fill_ready, _ready),
    Entry("accept", KvAccept, _fill_accept, _accept),
    Entry("refuse", KvRefuse, _fill_refuse, _refuse),
    Entry("ack", KvAck, _fill_ack, _ack),
)

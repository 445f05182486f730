"""KV of runners of three ranks: streams between equal ranks, one completion for all; a lost part loses the whole."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from harness.kv_ends import EPOCH, PAGE_TOKENS, PAGES, POOL, Machine, Pair, connect, opened
from harness.waiting import wait_until
from weft.domain.ids import RunnerId
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvHello, KvOffer, KvReady, KvRefuse
from weft.domain.machine import Close, Closed, Connected, Kind, Peer, Received, Send
from weft_runner.core import KvIdentity, OpenKvStream, ReceiveKv, SendKv
from weft_runner.core.events import DropKv
from weft_runner.core.transfer.shards import (
    KvShard,
    SendComplete,
    ShardedTransfers,
    ShardLost,
    ShardOrder,
    shard_runner,
)
from weft_runner.core.transfer.transfers import MAX_OFFERS
from weft_runner.model import CalledLayerCounter, LocalKvMemory
from weft_runner.shell.kv_ranks import RankKv, ShardedKvStreams
from weft_runner.shell.kv_transfer import KvPlace, KvStreamShell

SHAPES = ((4, 96), (3, 160), (5, 32))  # of each rank: layers, bytes of one in a page
BASE = "sha256:" + "0" * 64


class Ranks(Machine):
    """A runner of three ranks in this process; the test is the machine of rank 0.

    What rank 0 sends the others comes to them at once, unless `held` keeps it, as a long step would.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.runner = RunnerId(f"acme.{name}", f"{name}-1")
        self.pages = [np.zeros((PAGES, layers * size), np.uint8) for layers, size in SHAPES]
        self.pids, self.held, self.hold = (0, 0), list[ShardOrder](), False
        self._on_event: Callable[[int, Any], None] | None = None
        self.shell = ShardedKvStreams(self._own, self, self.events.put)
        self.others = [self._rank(rank) for rank in (1, 2)]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.own.port}"

    def peer(self) -> Peer:
        return Peer(Kind.RUNNER, f"{self.runner.uuid}/{self.runner.incarnation}")

    def hello(self, to: "Ranks") -> KvHello:
        return KvHello(self.runner, to.runner.incarnation, POOL, BASE, "rank 0")

    def listen(self, on_event: Callable[[int, Any], None]) -> None:
        self._on_event = on_event

    def broadcast(self, *command: Any) -> None:
        _, order = command
        self.held.append(order)
        if not self.hold:
            self.release()

    def release(self) -> None:
        self.hold, orders, self.held = False, self.held, []
        for order in orders:
            for rank in self.others:
                rank.order(order)

    def ready(self) -> KvReady:
        return KvReady(self.runner, tuple(f"127.0.0.1:{rank.port}" for rank in self.others))

    def close(self) -> None:
        self.shell.close()
        for rank in self.others:
            rank.close()

    def _place(self, runner: RunnerId) -> KvPlace:
        return KvPlace("127.0.0.1:0", runner, POOL, PAGE_TOKENS)

    def _memory(self, rank: int) -> LocalKvMemory:
        return LocalKvMemory(self.pages[rank], SHAPES[rank][0], f"rank {rank}")

    def _own(self, post: Any) -> KvStreamShell:
        self.own = KvStreamShell(self._place(self.runner), self._memory(0), CalledLayerCounter(), post)
        return self.own

    def _rank(self, rank: int) -> RankKv:
        on_event = self._on_event
        assert on_event is not None
        identity = KvIdentity(shard_runner(self.runner, rank), POOL, BASE, f"rank {rank}")
        return RankKv(
            rank, identity, self._place(identity.runner), self._memory(rank), lambda event: on_event(rank, event)
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = connect(Ranks("sender"), Ranks("receiver"))
    for seed, pages in enumerate(made.sender.pages):
        pages[:] = np.random.default_rng(seed).integers(0, 256, pages.shape, dtype=np.uint8)
    yield made
    made.close()


def check(pair: Pair, sent: tuple[int, ...], received: tuple[int, ...]) -> None:
    for own, theirs in zip(pair.sender.pages, pair.receiver.pages, strict=True):
        assert np.array_equal(own[list(sent)], theirs[list(received)])


def test_pages_of_every_rank_arrive_before_the_machine_gets_the_one_completion(pair: Pair) -> None:
    pair.accept("r", (9, 4, 5))
    pair.send("r", (1, 2))
    pair.send("r", (3,), first_page=2)
    pair.complete("r", 3 * PAGE_TOKENS)
    complete = pair.receiver.message(KvComplete)
    assert complete.tokens == (7,)
    check(pair, (1, 2, 3), (9, 4, 5))
    pair.receiver.shell.send(pair.incoming, KvAck("r", EPOCH))
    pair.sender.message(KvAck)
    assert pair.receiver.events.empty()


@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_the_completion_waits_for_ranks_whose_orders_are_late(pair: Pair, late: str) -> None:
    end: Ranks = getattr(pair, late)
    end.hold = True
    pair.accept("r", (9, 4))
    pair.send("r", (1, 2))
    pair.complete("r", 2 * PAGE_TOKENS)
    wait_until(lambda: bool((pair.receiver.pages[0][[9, 4]] == pair.sender.pages[0][[1, 2]]).all()), "rank 0's pages")
    assert pair.receiver.events.empty()
    end.release()
    pair.receiver.message(KvComplete)
    check(pair, (1, 2), (9, 4))


def test_a_sequence_whose_pages_are_all_there_completes_on_every_rank(pair: Pair) -> None:
    pair.accept("r", ())
    pair.complete("r", 0)
    assert pair.receiver.message(KvComplete).in_kv == 0


def test_a_rank_that_loses_its_part_ends_the_stream_at_both_machines(pair: Pair) -> None:
    pair.accept("r", (9, 4))
    pair.receiver.others[1].close()
    pair.send("r", (1, 2))
    closed = pair.sender.next(Closed)
    assert closed.peer == pair.receiver.peer()
    assert closed.reason.startswith("rank 2: ")
    assert pair.receiver.next(Closed).peer == pair.incoming


def test_a_receiver_of_fewer_ranks_than_its_layout_says_is_refused_by_name(pair: Pair) -> None:
    pair.receiver.shell.execute(Close(pair.incoming, "again"))
    pair.sender.next(Closed)
    incoming = opened(pair.sender, pair.receiver)
    pair.receiver.shell.send(incoming, KvReady(pair.receiver.runner))
    assert pair.sender.next(Closed).reason == "a runner of 1 ranks: this one has 3"
    assert pair.receiver.next(Closed).peer == incoming


@pytest.mark.parametrize("last", ["rank 0", "the liar"])
def test_a_rank_that_completes_with_other_tokens_than_rank_0_is_refused_by_name(pair: Pair, last: str) -> None:
    """Else the sequence would go on from pages that nobody has written."""
    to, addresses = pair.receiver.peer(), pair.receiver.ready().shard_addresses
    pair.accept("r", (9, 4))
    pair.sender.hold = True
    if last == "the liar":
        pair.send("r", (1, 2))
        pair.complete("r", 2 * PAGE_TOKENS)
        wait_until(lambda: bool((pair.receiver.pages[0][[9, 4]] == pair.sender.pages[0][[1, 2]]).all()), "its pages")
    for rank, pages in zip(pair.sender.others, ((1, 2), (1,)), strict=True):
        complete = KvComplete("r", EPOCH, len(pages) * PAGE_TOKENS)
        rank.order(ShardOrder(SendKv(to, "r", EPOCH, 0, pages), addresses))
        rank.order(ShardOrder(SendComplete(to, complete), addresses))
    if last == "rank 0":
        wait_until(lambda: bool((pair.receiver.pages[2][9] == pair.sender.pages[2][1]).all()), "the liar's pages")
        pair.send("r", (1, 2))
        pair.complete("r", 2 * PAGE_TOKENS)
    closed = pair.receiver.next(Closed)
    assert closed == Closed(pair.incoming, f"r: {PAGE_TOKENS} tokens in KV of rank 2, {2 * PAGE_TOKENS} of rank 0")
    assert pair.sender.next(Closed).peer == to


def test_dropped_kv_changes_no_page_of_any_rank_and_the_stream_continues(pair: Pair) -> None:
    pair.accept("dropped", (9, 4))
    pair.drop("dropped", "receiver")
    pair.send("dropped", (1, 2))
    pair.drop("dropped", "sender")
    pair.accept("r", (11,))
    pair.send("r", (3,))
    pair.complete("r", 1 * PAGE_TOKENS)
    pair.receiver.message(KvComplete)
    check(pair, (3,), (11,))
    assert not any(pages[[9, 4]].any() for pages in pair.receiver.pages)


# ---- one rank, without streams

HERE, THERE = RunnerId("acme.here", "h"), RunnerId("acme.there", "t")
FROM, INCOMING = Peer(Kind.RUNNER, "acme.there/t/1"), Peer(Kind.RUNNER, "acme.there/t.1/8")


@pytest.fixture
def shard() -> KvShard:
    return KvShard(1, KvIdentity(shard_runner(HERE, 1), POOL, BASE, "rank 1"))


def test_a_part_from_another_runner_than_rank_0_awaits_it_from_is_refused(shard: KvShard) -> None:
    shard.order(ShardOrder(ReceiveKv(FROM, "r", EPOCH, 0, (1,))))
    other = Peer(Kind.RUNNER, "acme.else/t.1/3")
    (refused,) = shard.event(Received(other, KvOffer("r", EPOCH, "")))
    assert refused == Send(other, KvRefuse("r", EPOCH, "it is awaited from another runner"))
    assert shard.event(Received(INCOMING, KvOffer("r", EPOCH, "")))[1] == Send(INCOMING, KvAccept("r", EPOCH, 0))


def test_another_layout_is_refused_by_name(shard: KvShard) -> None:
    (close,) = shard.event(Connected(INCOMING, KvHello(THERE, "h.1", POOL, BASE, "rank 2")))
    assert getattr(close, "reason", "") == "KV layout 'rank 2' is not 'rank 1'"


def test_offers_that_nobody_awaits_are_bounded(shard: KvShard) -> None:
    for number in range(MAX_OFFERS):
        assert shard.event(Received(INCOMING, KvOffer(f"r{number}", EPOCH, ""))) == []
    assert shard.event(Received(INCOMING, KvOffer("one more", EPOCH, ""))) == [
        Send(INCOMING, KvRefuse("r0", EPOCH, "nobody waits for it"))
    ]


def test_a_stream_that_ends_loses_the_parts_that_are_not_complete_and_is_opened_again_for_the_next(
    shard: KvShard,
) -> None:
    peer, to = Peer(Kind.RUNNER, "acme.there/t.1"), Peer(Kind.RUNNER, "acme.there/t")
    sends = [ShardOrder(SendKv(to, name, EPOCH, 0, (1,)), ("a:1", "a:2")) for name in ("r0", "r1", "r2")]
    (opened,) = shard.order(sends[0])
    assert opened == OpenKvStream(peer, "a:1", KvHello(shard_runner(HERE, 1), "t.1", POOL, BASE, "rank 1"))
    assert shard.order(sends[1]) == []
    assert len(shard.event(Connected(peer, KvReady(shard_runner(THERE, 1))))) == 2
    assert shard.event(Closed(peer, "cut")) == [ShardLost("r0", EPOCH, "cut"), ShardLost("r1", EPOCH, "cut")]
    assert isinstance(shard.order(sends[2])[0], OpenKvStream)


def test_a_part_that_was_acknowledged_is_not_lost_with_its_stream(shard: KvShard) -> None:
    peer, to = Peer(Kind.RUNNER, "acme.there/t.1"), Peer(Kind.RUNNER, "acme.there/t")
    send = ShardOrder(SendKv(to, "r", EPOCH, 0, (1,)), ("a:1", "a:2"))
    shard.order(send)
    shard.event(Connected(peer, KvReady(shard_runner(THERE, 1))))
    shard.event(Received(peer, KvAccept("r", EPOCH, 0)))
    shard.event(Received(peer, KvAck("r", EPOCH)))
    assert shard.event(Closed(peer, "cut")) == []
    assert isinstance(shard.order(send)[0], OpenKvStream)
    assert shard.event(Closed(peer, "cut")) == [ShardLost("r", EPOCH, "cut")]
    assert isinstance(shard.order(send)[0], OpenKvStream), "what was lost is sent again from the start"


# ---- rank 0's view of the others


@pytest.mark.parametrize("over", ["acknowledged", "refused", "dropped", "closed"])
def test_what_a_rank_loses_of_a_transfer_that_is_over_is_nobodys_loss(over: str) -> None:
    transfers, to = ShardedTransfers(2), Peer(Kind.RUNNER, "acme.there/t")
    transfers.event(Connected(to, KvReady(THERE, ("a:1", "a:2"))))
    assert transfers.ordered(SendKv(to, "r", EPOCH, 0, (1,))) is not None
    match over:
        case "acknowledged":
            transfers.event(Received(to, KvAck("r", EPOCH)))
        case "refused":
            transfers.event(Received(to, KvRefuse("r", EPOCH, "no room")))
        case "dropped":
            transfers.ordered(DropKv(to, "r", EPOCH))
        case _:
            transfers.event(Closed(to, "cut"))
    assert transfers.shard_event(1, ShardLost("r", EPOCH, "cut")) is None


def test_what_a_rank_loses_of_a_transfer_under_way_loses_the_stream() -> None:
    transfers, to = ShardedTransfers(2), Peer(Kind.RUNNER, "acme.there/t")
    transfers.event(Connected(to, KvReady(THERE, ("a:1", "a:2"))))
    transfers.ordered(SendKv(to, "r", EPOCH, 0, (1,)))
    assert transfers.shard_event(1, ShardLost("r", EPOCH, "cut")) == Closed(to, "rank 1: cut")

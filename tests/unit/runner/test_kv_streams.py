"""Streams of KV with real sockets: what arrives is what was sent, and nobody else's pages are touched."""

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from harness.certificates import Authority
from harness.kv_ends import EPOCH, LAYER_BYTES, LAYERS, PAGE_BYTES, PAGE_TOKENS, End, Liar, Pair, closed, connect
from harness.waiting import PATIENCE_S, wait_until
from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvAck, KvComplete, KvHello, KvOffer, KvReady, KvRefuse
from weft.domain.machine import Close, Closed, Connected
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KvPages
from weft.wire.tls import Tls
from weft_runner.core import OpenKvStream, SendKv
from weft_runner.core.events import DropKv
from weft_runner.model import LocalKvMemory
from weft_runner.model.torch_kv_memory import StagedKvWindow
from weft_runner.shell.kv_connection import KvConnection, KvConnectionClosed
from weft_runner.shell.kv_ring import RING_BYTES, TOKEN_BYTES, UNCLAIMED, hand_over
from weft_runner.shell.kv_transfer import PREFACE

Make = Callable[..., End]


@pytest.fixture
def end() -> Iterator[Make]:
    made: list[End] = []

    def make(name: str, **options: Any) -> End:
        made.append(End(name, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pair(end: Make) -> Pair:
    sender, receiver = end("sender"), end("receiver")
    sender.draw()
    return connect(sender, receiver)


def in_place(memory: LocalKvMemory) -> LocalKvMemory:
    return memory


class Staged(LocalKvMemory):
    """Memory like a GPU's: pages pass through staging memory."""

    def __init__(self, of: LocalKvMemory) -> None:
        super().__init__(of._pages, of._layers, of.layout)

    def window(self) -> Any:
        return StagedKvWindow(torch.from_numpy(self._pages).view(len(self._pages), self._layers, -1))


@pytest.mark.parametrize("wrap", [in_place, Staged])
@pytest.mark.parametrize("layer_by_layer", [False, True])
@pytest.mark.parametrize("shared_memory", [False, True])
def test_pages_arrive_where_the_receiver_has_reserved_them(
    end: Make, wrap: Any, layer_by_layer: bool, shared_memory: bool
) -> None:
    sender = end("sender", wrap=wrap, shared_memory=shared_memory)
    receiver = end("receiver", fill=255, wrap=wrap)
    sender.draw()
    pair, here, there = connect(sender, receiver), (3, 4, 5, 9, 8), (20, 2, 3, 4, 40)
    pair.accept("r", there)
    pair.send("r", here[:3])
    pair.send("r", here[3:], first_page=3, layer_by_layer=layer_by_layer)
    if layer_by_layer:
        sender.progress.raise_by(1)
        wait_until(lambda: receiver.figures.bytes("in") == (3 * LAYERS + 2) * LAYER_BYTES, "the first layer arrives")
        sender.progress.raise_by(LAYERS - 1)
    pair.complete("r", 5 * PAGE_TOKENS - 3)
    complete = receiver.message(KvComplete)
    assert (complete.in_kv, list(complete.tokens)) == (5 * PAGE_TOKENS - 3, [7])
    assert np.array_equal(receiver.pages[list(there)], sender.pages[list(here)])
    others = sorted(set(range(len(receiver.pages))) - set(there))
    assert (receiver.pages[others] == 255).all()
    receiver.shell.send(pair.incoming, KvAck("r", EPOCH))
    assert sender.message(KvAck) == KvAck("r", EPOCH)
    assert sender.figures.results == [("out", "complete", layer_by_layer)]
    assert receiver.figures.results == [("in", "complete", False)]
    assert sender.figures.bytes("out") == receiver.figures.bytes("in") == 5 * PAGE_BYTES
    carriers = {carrier for _, carrier, _ in sender.figures.moved + receiver.figures.moved}
    assert carriers == {"memory" if shared_memory else "tcp"}


def test_neighbouring_pages_are_one_write_and_layers_of_pages_one_each() -> None:
    window = LocalKvMemory(np.zeros((8, PAGE_BYTES), np.uint8), LAYERS).window()
    parts = window.outgoing((1, 2, 3, 6, 5), 0, LAYERS, None)
    assert [len(part) for part in parts] == [3 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES]
    assert [len(part) for part in window.outgoing((1, 2), 1, 2, None)] == [2 * LAYER_BYTES] * 2


@pytest.mark.parametrize("shared_memory", [False, True])
def test_pages_of_many_pieces_arrive_whole(end: Make, shared_memory: bool) -> None:
    """A page larger than a piece leaves in several, and so do many pages."""
    sizes = {"pages": 6, "layers": 4, "layer_bytes": 3 << 20}
    sender, receiver = end("sender", shared_memory=shared_memory, **sizes), end("receiver", **sizes)
    sender.draw()
    pair = connect(sender, receiver)
    pair.accept("r", (0, 1, 2))
    pair.send("r", (3, 4, 5))
    pair.complete("r", 3 * PAGE_TOKENS)
    receiver.message(KvComplete)
    assert np.array_equal(receiver.pages[:3], sender.pages[3:])


def test_the_next_layer_waits_for_the_step(pair: Pair) -> None:
    pair.accept("r", (0,))
    pair.send("r", (0,), layer_by_layer=True)
    pair.complete("r", PAGE_TOKENS)
    pair.sender.pages[0, 2 * LAYER_BYTES :] = 0
    pair.sender.progress.raise_by(2)
    wait_until(lambda: pair.receiver.figures.bytes("in") == 2 * LAYER_BYTES, "two layers arrive")
    pair.sender.pages[0, 2 * LAYER_BYTES :] = 9
    pair.sender.progress.raise_by(LAYERS - 2)
    pair.receiver.message(KvComplete)
    assert np.array_equal(pair.receiver.pages[0], pair.sender.pages[0])


def test_a_step_that_runs_again_ends_the_streams_that_send_its_layers(pair: Pair) -> None:
    pair.accept("r", (0,))
    pair.send("r", (0,), layer_by_layer=True)
    pair.sender.progress.raise_by(1)
    pair.sender.shell.step_failed()
    assert pair.sender.next(Closed).reason == "a step failed whose layers were being sent"
    assert closed(pair.receiver).peer == pair.incoming


def test_a_drop_at_the_sender_removes_what_waits_and_keeps_the_stream(pair: Pair) -> None:
    pair.accept("a", (0, 1))
    pair.accept("b", (2,))
    pair.send("a", (0,), layer_by_layer=True)  # waits for a step, with everything behind it
    pair.send("a", (1,), first_page=1)
    pair.send("b", (5,))
    pair.drop("a", "sender")
    pair.complete("b", PAGE_TOKENS)
    assert pair.receiver.message(KvComplete).request_id == "b"
    assert np.array_equal(pair.receiver.pages[2], pair.sender.pages[5])
    assert not pair.receiver.pages[:2].any()
    assert ("out", "dropped", True) in pair.sender.figures.results


def test_what_was_dropped_at_the_sender_is_never_called_complete(pair: Pair) -> None:
    """The dropped pages had not left: the receiver would go on from what it has not got."""
    pair.accept("a", (20, 21))
    pair.send("a", (3, 4), layer_by_layer=True)
    pair.complete("a", 2 * PAGE_TOKENS)
    pair.drop("a", "sender")
    pair.accept("b", (30,))
    pair.send("b", (5,))
    pair.complete("b", PAGE_TOKENS)
    assert pair.receiver.message(KvComplete).request_id == "b"


def test_after_a_drop_at_the_receiver_no_byte_is_written_and_the_stream_stays(end: Make) -> None:
    """Between two halves of a part: the second one comes, and goes nowhere."""
    receiver = end("receiver")
    liar = Liar(receiver)
    liar.offer("r", (4, 5))
    half = memoryview(bytes([1]) * PAGE_BYTES)
    liar.say(KvPages("r", EPOCH, 0, 2, 0, LAYERS, 2 * PAGE_BYTES))
    liar.channel.send([half])
    wait_until(lambda: bool(receiver.pages[4].all()), "the first page is there")
    receiver.shell.execute(DropKv(liar.peer, "r", EPOCH))
    receiver.pages[:] = 0
    liar.channel.send([half])
    liar.part("r", 0, 1)  # of an epoch that is over now
    liar.say(KvComplete("r", EPOCH, 2 * PAGE_TOKENS, (1,)))
    liar.offer("other")
    assert not receiver.pages.any()
    assert receiver.figures.results == [("in", "dropped", False)]
    liar.close()


def test_what_was_refused_may_still_come_and_goes_nowhere(end: Make) -> None:
    receiver = end("receiver")
    liar = Liar(receiver)
    liar.offer("r")
    receiver.shell.send(liar.peer, KvRefuse("r", EPOCH, "another adapter"))
    assert liar.hear() == KvRefuse("r", EPOCH, "another adapter")
    liar.part("r", 0, 2)
    liar.offer("other")
    assert not receiver.pages.any()
    liar.close()


def _hello_again(liar: Liar) -> None:
    liar.say(KvHello(liar.runner, liar.receiver.runner.incarnation, "a/b", "", "test"))


LIES: dict[str, tuple[Callable[[Liar], Any], str]] = {
    "pages never offered": (lambda liar: liar.part("x", 0, 1), "pages of an epoch that was not offered"),
    "pages of a stale epoch": (lambda liar: liar.part("r", 0, 1, epoch=Epoch(1, 0)), "was not offered"),
    "pages before they are accepted": (
        lambda liar: (liar.say(KvOffer("y", EPOCH, "")), liar.part("y", 0, 1)),
        "pages that were not accepted",
    ),
    "an offer again": (lambda liar: liar.say(KvOffer("r", EPOCH, "")), "offered before"),
    "a hello again": (_hello_again, "a second hello"),
    "too many bytes": (lambda liar: liar.part("r", 0, 1, n_bytes=PAGE_BYTES + 1), "bytes for 4 layers of 1 pages"),
    "too few bytes": (lambda liar: liar.part("r", 0, 2, n_bytes=PAGE_BYTES), "bytes for 4 layers of 2 pages"),
    "too much at a time": (lambda liar: liar.part("r", 0, 1 << 20, n_bytes=1 << 30), "at a time"),
    "pages behind the last": (lambda liar: liar.part("r", 2, 2), "outside of what is expected"),
    "pages before the first": (lambda liar: liar.part("late", 1, 1), "outside of what is expected"),
    "layers that are not": (lambda liar: liar.part("r", 0, 1, first_layer=3, layers=2), "outside of what is expected"),
    "a page twice": (lambda liar: (liar.part("r", 0, 1), liar.part("r", 0, 1)), "received before"),
    "a layer twice": (
        lambda liar: (liar.part("r", 0, 2, first_layer=1, layers=1), liar.part("r", 1, 1, layers=2)),
        "received before",
    ),
    "complete without pages": (lambda liar: liar.say(KvComplete("r", EPOCH, 16, (1,))), "4 parts of it are missing"),
    "complete without a layer": (
        lambda liar: (liar.part("r", 0, 3, layers=3), liar.say(KvComplete("r", EPOCH, 48, (1,)))),
        "3 parts of it are missing",
    ),
    "more tokens than pages": (lambda liar: liar.say(KvComplete("r", EPOCH, 49, (1,))), "more than the pages"),
    "pages beyond the tokens": (
        lambda liar: (liar.part("r", 0, 2), liar.say(KvComplete("r", EPOCH, 16, (1,)))),
        "pages beyond those of 16 tokens",
    ),
    "complete of nothing": (lambda liar: liar.say(KvComplete("x", EPOCH, 0, ())), "complete of an epoch"),
    "an endless message": (
        lambda liar: liar.channel.send([memoryview((1 << 30).to_bytes(4))]),
        "a message of 1073741824 bytes",
    ),
    "no message": (lambda liar: liar.channel.send_frame(b"\xff\xff\xff"), "cannot be read"),
    "an unknown message": (lambda liar: liar.channel.send_frame(b""), "unknown message"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_breaks_the_contract_loses_its_stream_by_name(end: Make, lie: str) -> None:
    """The liar writes nowhere but to the pages that it may; the process and other streams go on."""
    act, said = LIES[lie]
    receiver, honest = end("receiver"), end("sender")
    pair, liar = connect(honest, receiver), Liar(receiver)
    liar.offer("r", (10, 30, 50))
    liar.offer("late", (11,), first_page=2)
    with contextlib.suppress(KvConnectionClosed):  # refused before it was through
        act(liar)
    over = closed(receiver)
    assert over.peer == liar.peer
    assert said in over.reason
    assert set(np.flatnonzero(receiver.pages.any(axis=1))) <= {10, 30, 50}
    liar.close()
    honest.draw()
    pair.accept("fine", (0,))
    pair.send("fine", (7,))
    pair.complete("fine", PAGE_TOKENS)
    receiver.message(KvComplete)
    assert np.array_equal(receiver.pages[0], honest.pages[7])


@pytest.mark.parametrize("tenth", range(10))
def test_a_connection_cut_at_any_tenth_ends_the_stream_and_nothing_else(end: Make, tenth: int) -> None:
    receiver = end("receiver")
    liar = Liar(receiver)
    liar.offer("r", (1, 2))
    liar.say(KvPages("r", EPOCH, 0, 2, 0, LAYERS, 2 * PAGE_BYTES))
    liar.channel.send([memoryview(bytes([1]) * (2 * PAGE_BYTES * tenth // 10))])
    liar.close()
    assert "closed" in closed(receiver).reason
    assert receiver.figures.results == [("in", "lost", False)]
    pair = connect(end("sender"), receiver)
    assert pair.incoming != liar.peer, "another stream has another name"


def test_a_sender_whose_receiver_is_gone_gets_one_closed_event(pair: Pair) -> None:
    pair.accept("r", (0,))
    pair.send("r", (0,), layer_by_layer=True)
    pair.receiver.close()
    assert pair.sender.next(Closed) == Closed(pair.outgoing, "the runner ends")
    pair.send("r", (0,))
    pair.complete("r", 16)
    assert pair.sender.events.empty()
    assert pair.sender.figures.results == [("out", "lost", True)]


def test_a_machine_that_closes_hears_nothing_more_and_its_reason_arrives(end: Make) -> None:
    sender, receiver = end("sender"), end("receiver")
    sender.shell.execute(OpenKvStream(receiver.peer(), receiver.address, sender.hello(receiver)))
    peer = receiver.next(Connected).peer
    receiver.shell.execute(Close(peer, "another layout: test, not bf16"))
    assert sender.next(Closed) == Closed(receiver.peer(), "another layout: test, not bf16")
    assert receiver.events.empty()


def test_a_receiver_of_another_incarnation_says_which_it_is(end: Make) -> None:
    sender, receiver = end("sender"), end("receiver")
    hello = KvHello(sender.runner, "an earlier one", "a/b", "", "")
    sender.shell.execute(OpenKvStream(receiver.peer(), receiver.address, hello))
    assert sender.next(Closed).reason == f"this is incarnation {receiver.runner.incarnation} of runner acme.receiver"
    assert receiver.events.empty(), "its machine did not see it"


def test_nobody_there(end: Make) -> None:
    sender, receiver = end("sender"), end("receiver")
    receiver.close()
    sender.shell.execute(OpenKvStream(receiver.peer(), receiver.address, sender.hello(receiver)))
    assert "cannot be reached" in sender.next(Closed).reason


def test_a_receiver_that_takes_nothing_is_given_up(end: Make) -> None:
    """The receiver reads no byte: the sender's buffers fill, and the deadline is over."""
    sizes = {"pages": 8, "layers": 4, "layer_bytes": 4 << 20}
    sender = end("sender", stall_s=0.2, **sizes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        sender.shell.execute(OpenKvStream(sender.peer(), address, sender.hello(sender)))
        sock, _ = server.accept()
        channel = KvConnection(sock, PATIENCE_S)
        channel.receive([memoryview(bytearray(40))])
        channel.receive_frame()
        channel.send_frame(KV_FROM_RECEIVER.encode(KvReady(sender.runner)).SerializeToString())
        sender.next(Connected)
        sender.shell.execute(SendKv(sender.peer(), "r", EPOCH, 0, tuple(range(8))))
        assert sender.next(Closed).reason == "the other end takes nothing for 0.2 s"
        channel.close()


def test_two_streams_do_not_wait_for_each_other(end: Make) -> None:
    """One waits for a step's layers, the other passes."""
    sender, one, other = end("sender"), end("one"), end("other")
    sender.draw()
    blocked, free = connect(sender, one), connect(sender, other)
    blocked.accept("r", (0,))
    free.accept("s", (0,))
    blocked.send("r", (0,), layer_by_layer=True)
    free.send("s", (1,))
    free.complete("s", PAGE_TOKENS)
    other.message(KvComplete)
    assert np.array_equal(other.pages[0], sender.pages[1])


def test_what_waits_for_a_stream_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_runner.shell.kv_stream.MAX_QUEUED", 10)
    pair.accept("r", (0,))
    pair.send("r", (0,), layer_by_layer=True)
    for _ in range(12):
        pair.send("r", (0,))
    assert pair.sender.next(Closed).reason == "10 messages wait for the other end"


# ---- shared memory


def handed_over(receiver: End, memory: int, token: bytes) -> bytes:
    """What a receiver answers to that memory; nothing: it closes."""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.settimeout(PATIENCE_S)
        sock.connect(f"\0weft-kv/{receiver.peer().name}")
        socket.send_fds(sock, [token], [memory])
        return sock.recv(1)
    return b""


BOTH_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("n_bytes", "seals", "token"),
    [
        (RING_BYTES, 0, bytes(TOKEN_BYTES)), (RING_BYTES, fcntl.F_SEAL_GROW, bytes(TOKEN_BYTES)),
        (0, BOTH_SEALS, bytes(TOKEN_BYTES)), (RING_BYTES, BOTH_SEALS, b"short"),
    ],
    ids=["no seal", "may shrink", "of another size", "without a token"],
)  # fmt: skip
def test_memory_that_no_ring_can_be_in_is_refused(end: Make, n_bytes: int, seals: int, token: bytes) -> None:
    """A read behind the end of one that its sender takes away would end the process."""
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, n_bytes)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    assert handed_over(end("receiver"), memory, token) == b""
    os.close(memory)


def test_memory_of_another_user_is_refused_at_both_ends(end: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, us = end("receiver"), os.geteuid()
    monkeypatch.setattr("weft_runner.shell.kv_ring.os.geteuid", lambda: us + 1)
    memory = os.memfd_create("test")
    assert handed_over(receiver, memory, bytes(TOKEN_BYTES)) == b""
    assert hand_over(receiver.peer().name, PATIENCE_S) is None
    os.close(memory)


def test_without_the_token_of_a_handover_a_connection_has_no_memory(end: Make) -> None:
    receiver = end("receiver")
    with socket.create_connection(("127.0.0.1", receiver.shell.port)) as sock:
        sock.sendall(PREFACE + b"x" * TOKEN_BYTES)
        sock.settimeout(PATIENCE_S)
        assert sock.recv(1) == b""
    assert receiver.events.empty()


def test_rings_whose_connection_never_comes_are_bounded(end: Make) -> None:
    receiver = end("receiver")
    rings = [hand_over(receiver.peer().name, PATIENCE_S) for _ in range(UNCLAIMED + 5)]
    claimed = [receiver.shell._rings.claim(ring[0]) for ring in rings if ring is not None]  # pyright: ignore[reportOptionalMemberAccess, reportPrivateUsage]
    assert [ring is not None for ring in claimed] == [False] * 5 + [True] * UNCLAIMED
    for _, ring in filter(None, rings):
        ring.close()


@pytest.mark.parametrize("at", ["sender", "receiver"])
def test_a_drop_amid_shared_memory_ends_that_transfer_and_not_the_stream(end: Make, at: str) -> None:
    """A part of more slots than there are: the rest of it passes, and is written nowhere."""
    sizes = {"pages": 8, "layers": 1, "layer_bytes": 4 << 20}
    sender, receiver = end("sender", shared_memory=True, **sizes), end("receiver", **sizes)
    sender.draw()
    pair = connect(sender, receiver)
    pair.accept("a", (0, 1, 2))
    pair.accept("b", (3,))
    pair.send("a", (0, 1, 2))
    pair.drop("a", at)
    before = receiver.pages[:3].copy()
    pair.send("b", (4,))
    pair.complete("b", PAGE_TOKENS)
    assert receiver.message(KvComplete).request_id == "b"
    assert np.array_equal(receiver.pages[3], sender.pages[4])
    if at == "receiver":
        assert np.array_equal(receiver.pages[:3], before)


def test_shared_memory_ends_with_its_stream(end: Make) -> None:
    """The other process is lost amid a part: whoever waits for its memory is told."""
    receiver = end("receiver")
    made = hand_over(receiver.peer().name, PATIENCE_S)
    assert made is not None
    token, ring = made
    liar = Liar(receiver, token=token)
    liar.offer("r", (1, 2))
    liar.say(KvPages("r", EPOCH, 0, 2, 0, LAYERS, 2 * PAGE_BYTES))
    ring.close()
    assert "shared memory was closed" in closed(receiver).reason
    liar.close()


# ---- mutual TLS


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def secured(authority: Authority, tmp_path: Any, name: str, *roles: str) -> Tls:
    return Tls(authority.folder(tmp_path / name, *roles), "runner")


def test_under_tls_runners_of_a_namespace_exchange_kv(end: Make, authority: Authority, tmp_path: Any) -> None:
    roles = "runner", "acme.runner"
    sender = end("sender", tls=secured(authority, tmp_path, "s", *roles))
    receiver = end("receiver", tls=secured(authority, tmp_path, "r", *roles))
    sender.draw()
    pair = connect(sender, receiver)
    pair.accept("r", tuple(range(40)))
    pair.send("r", tuple(range(20)))
    pair.drop("r", "sender")
    pair.accept("s", tuple(range(40, 60)))
    pair.send("s", tuple(range(20, 40)))
    pair.complete("s", 20 * PAGE_TOKENS)
    receiver.message(KvComplete)
    assert np.array_equal(receiver.pages[40:60], sender.pages[20:40])
    assert {carrier for _, carrier, _ in receiver.figures.moved} == {"tls"}


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (("gateway",), "the caller's certificate is of gateway; KvTransfer needs runner"),
        (("runner", "globex.runner"), "its certificate is for runners of globex, not of acme"),
    ],
)
def test_under_tls_nobody_else_opens_a_stream(
    end: Make, authority: Authority, tmp_path: Any, caplog: pytest.LogCaptureFixture, roles: tuple[str, ...], said: str
) -> None:
    receiver = end("receiver", tls=secured(authority, tmp_path, "r", "runner", "acme.runner"))
    client = Tls(authority.folder(tmp_path / "c", *roles), roles[0])  # type: ignore[arg-type]
    sock = socket.create_connection(("127.0.0.1", receiver.shell.port))
    stranger = client.client_context("runner").wrap_socket(sock)
    stranger.settimeout(PATIENCE_S)
    assert stranger.recv(1) == b""
    wait_until(lambda: said in str([vars(record).get("kv") for record in caplog.records]), "it is refused by name")
    assert receiver.events.empty()
    stranger.close()


def test_under_tls_a_sender_trusts_no_runner_of_another_namespace(
    end: Make, authority: Authority, tmp_path: Any
) -> None:
    sender = end("sender", tls=secured(authority, tmp_path, "s", "runner", "acme.runner"))
    receiver = end("receiver", tls=secured(authority, tmp_path, "r", "runner", "globex.runner"), pool="globex/p")
    sender.shell.execute(OpenKvStream(receiver.peer(), receiver.address, sender.hello(receiver)))
    assert sender.next(Closed).reason == "its certificate is for runners of globex, not of acme"


@pytest.mark.parametrize("sent", [b"weft-kv1" * 100, b"\x16\x03\x01", b""], ids=["plain", "a beginning", "nothing"])
def test_plain_bytes_where_tls_is_expected_hold_no_thread(
    end: Make, authority: Authority, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Neither do those that are no more than the beginning of a handshake, and those that never come."""
    monkeypatch.setattr("weft_runner.shell.kv_transfer.CONNECT_S", 0.1)
    receiver = end("receiver", tls=secured(authority, tmp_path, "r", "runner", "acme.runner"))
    with socket.create_connection(("127.0.0.1", receiver.shell.port)) as sock:
        sock.sendall(sent)
        sock.settimeout(PATIENCE_S)
        try:
            while sock.recv(1 << 10):
                pass
        except ConnectionResetError:
            pass
    wait_until(lambda: not any("kv-in" in thread.name for thread in threading.enumerate()), "its threads end")
    assert receiver.events.empty()

"""KV between two runner machines: what the second one goes on with is what the first one has computed, or nothing."""

from collections import deque
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvHello, KvOffer, KvReady, KvRefuse
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.request import (
    Ended,
    EndReason,
    FinishReason,
    Freeze,
    Frozen,
    KvTarget,
    NoCapacity,
    Sampling,
    SessionHello,
    Start,
    Step,
    Stop,
)
from weft.domain.runner import RunnerOrder, RunnerRole
from weft_runner.core import BatchLimits, KvIdentity, PoolLimits, Runner, SampledToken
from weft_runner.core import events as ev
from weft_runner.core.sequence import SequencePhase

A, B = RunnerId("ns.a", "1"), RunnerId("ns.b", "1")
TO_B, FROM_A = Peer(Kind.RUNNER, "ns.b/1"), Peer(Kind.RUNNER, "ns.a/1/7")
GATEWAY = Peer(Kind.GATEWAY, "g/1")
SUPERVISOR = Peer(Kind.SUPERVISOR, "s")
E1, E2 = Epoch(1, 1), Epoch(1, 2)
HELLO = KvHello(A, "1", "ns/p", "sha256:base", "layout")
PAGE = 4
CLAIM_S = 2.0


class Side:
    """A runner, the contents of its pages, and what it has said to the gateway."""

    def __init__(self, identity: RunnerId, **fields: Any) -> None:
        limits = PoolLimits(
            total_pages=32, page_tokens=PAGE, max_sequences=4, max_adapters=4, max_context_tokens=100, vocab_size=1000,
            batch=BatchLimits(max_batch_tokens=8), kv=KvIdentity(identity, "ns/p", "sha256:base", "layout"),
            kv_claim_s=CLAIM_S,
        )  # fmt: skip
        self.machine = Runner(replace(limits, **fields))
        self.pages: dict[int, dict[int, int]] = {}
        self.said: list[Any] = []
        self.now = 0.0

    def tokens(self) -> list[int]:
        """Tokens of the answer, by position."""
        at: dict[int, int] = {}
        for message in self.said:
            for sequence in message.sequences if isinstance(message, Step) else ():
                for offset, token in enumerate(sequence.tokens):
                    assert at.setdefault(sequence.position + offset, token) == token
        return [at[position] for position in sorted(at)]

    def ended(self) -> list[Ended]:
        return [message for message in self.said if isinstance(message, Ended)]


class Pair:
    """Two runners and the stream between them. Messages are on their way until `carry`."""

    def __init__(self, **fields: Any) -> None:
        self.a, self.b = Side(A, **fields), Side(B, **fields)
        self.wire: deque[tuple[Side, Any]] = deque()
        self.sent: list[Any] = []  # by both, in order
        self.awaited: dict[str, ev.ReceiveKv] = {}
        self.dropped: list[ev.DropKv] = []
        self.streaming: list[ev.SendKv] = []
        self.open = False
        for side in (self.a, self.b):
            self.do(side, Connected(GATEWAY, SessionHello("g", "1")))

    def do(self, side: Side, event: Any) -> None:
        for effect in side.machine.handle(event, side.now):
            self.perform(side, effect)
        side.machine.check()

    def perform(self, side: Side, effect: Any) -> None:
        match effect:
            case Send(peer, message) if peer.kind is Kind.GATEWAY:
                side.said.append(message)
            case Send(peer, message) if peer.kind is Kind.RUNNER:
                self.sent.append(message)
                if self.open or isinstance(message, KvReady):
                    self.wire.append((self.b if side is self.a else self.a, message))
            case ev.OpenKvStream(peer, "kv", hello):
                assert peer == TO_B
                self.wire.append((self.b, hello))
            case ev.SendKv(layer_by_layer=True):
                self.streaming.append(effect)
            case ev.SendKv():
                self.send(effect)
            case ev.ReceiveKv():
                self.awaited[effect.request_id] = effect
            case ev.DropKv(request_id=request_id):
                self.dropped.append(effect)
                if side is self.b:
                    self.awaited.pop(request_id, None)
                else:
                    self.wire = deque(
                        (to, item) for to, item in self.wire
                        if not (isinstance(item, ev.SendKv | KvComplete) and item.request_id == request_id)
                    )  # fmt: skip
            case Close(peer, reason):
                self.sent.append(effect)
                self.open = False
                self.wire.append((self.a if side is self.b else self.b, Closed(peer, reason)))
            case ev.RunStep():
                self.run(side, effect)
            case _:
                pass

    def send(self, effect: ev.SendKv) -> None:
        self.sent.append(effect)
        self.wire.append((self.b, effect))

    def run(self, side: Side, step: ev.RunStep) -> None:
        """A token depends on what the pages hold, and on nothing else."""
        for page in step.clear_pages:
            side.pages[page] = {}
        tokens: dict[str, SampledToken] = {}
        for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
            held = side.machine.pool.pages.pages_of(row.key)
            for position in range(sequence.in_kv, sequence.in_kv + row.n_tokens):
                side.pages.setdefault(held[position // PAGE], {})[position] = sequence.tokens[position]
            end = sequence.in_kv + row.n_tokens
            read = [side.pages[held[position // PAGE]].get(position) for position in range(end)]
            if row.samples:
                tokens[row.key] = SampledToken(after(read))
        streaming, self.streaming = self.streaming, []
        for effect in streaming:
            self.send(effect)
        self.do(side, ev.StepDone(step, ev.StepResults(tokens, {}), 1.0))

    def step(self, *sides: Side) -> None:
        for side in sides or (self.a, self.b):
            self.do(side, ev.StepSlot())

    def carry(self, most: int = 1000) -> int:
        """Deliver what is on its way; how much there was."""
        count = 0
        while self.wire and count < most:
            to, message = self.wire.popleft()
            count += 1
            match message:
                case KvHello():
                    self.do(self.b, Connected(FROM_A, message))
                case KvReady():
                    self.open = True
                    self.do(self.a, Connected(TO_B))
                case Closed():
                    self.do(to, Closed(TO_B if to is self.a else FROM_A, message.reason))
                case ev.SendKv(request_id=request_id, first_page=first_page, pages=pages):
                    if (awaited := self.awaited.get(request_id)) is not None:
                        for index, page in enumerate(pages, first_page):  # they are read as late as can be
                            self.b.pages[awaited.pages[index - awaited.first_page]] = dict(self.a.pages[page])
                case _:
                    self.do(to, Received(TO_B if to is self.a else FROM_A, message))
        return count

    def lose_stream(self) -> None:
        self.open = False
        self.wire.clear()
        self.do(self.a, Closed(TO_B, "reset"))
        self.do(self.b, Closed(FROM_A, "reset"))

    def finish(self, side: Side) -> None:
        for _ in range(200):
            self.carry()
            self.step()
            if not (self.a.machine.pool.sequences or self.b.machine.pool.sequences):
                return
        raise AssertionError(f"not over: {side.machine.pool.sequences}")


def after(read: list[int | None]) -> int:
    """The token behind these; any of them missing or another one changes it."""
    return 1 + int.from_bytes(blake2b(repr(read).encode(), digest_size=4).digest(), "big") % 900


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(after([*tokens]))
    return tokens[len(prompt) :]


def starts(prompt: list[int], max_tokens: int, key: str = "r", epoch: Epoch = E1) -> tuple[Start, Start]:
    """Return the Start of the prompt runner, and that of the token runner."""
    one = Start(key, epoch, tuple(prompt), (), max_tokens, 8, cache_salt="ns", sampling=Sampling(ignore_eos=True))
    return replace(one, reservation_tokens=1, kv_to=KvTarget(B, "kv")), replace(one, kv_from=A)


def begin(pair: Pair, prompt: list[int], max_tokens: int = 6, key: str = "r") -> None:
    on_a, on_b = starts(prompt, max_tokens, key)
    pair.do(pair.b, Received(GATEWAY, on_b))
    pair.do(pair.a, Received(GATEWAY, on_a))


def tell_b(pair: Pair, *messages: Any) -> None:
    """Open the stream from A to B, and say this on it, whatever A's machine would say."""
    pair.do(pair.b, Connected(FROM_A, HELLO))
    for message in messages:
        pair.do(pair.b, Received(FROM_A, message))


def idle(pair: Pair) -> bool:
    """Neither runner holds anything, and every page is free."""
    pools = [side.machine.pool for side in (pair.a, pair.b)]
    moving = any(pool.hand_over.kv.outgoing or pool.hand_over.kv.incoming for pool in pools)
    return not moving and all(not pool.sequences and pool.pages.free_pages == 32 for pool in pools)


PROMPT = list(range(10, 31))  # 21 tokens: three chunks of 8, six pages


@pytest.mark.parametrize("layer_by_layer_tokens", [5, 6])
def test_the_second_runner_continues_from_what_the_first_has_computed(layer_by_layer_tokens: int) -> None:
    pair = Pair(layer_by_layer_tokens=layer_by_layer_tokens)
    begin(pair, PROMPT)
    pair.finish(pair.b)
    assert pair.b.tokens() == expected(PROMPT, 6)
    assert pair.a.tokens() == expected(PROMPT, 1), "the first token comes from the runner that has computed it"
    assert pair.b.machine.pool.figures(ready=True).tokens == 5, "it computes no token of the prompt"
    pages = [
        page for s in pair.sent if isinstance(s, ev.SendKv) for page in range(s.first_page, s.first_page + len(s.pages))
    ]
    assert pages == list(range(6)), "each page leaves once, in order"
    assert [s.first_page for s in pair.sent if isinstance(s, ev.SendKv)][1:], "pages leave while the prompt is computed"
    assert any(s.layer_by_layer for s in pair.sent if isinstance(s, ev.SendKv)) == (layer_by_layer_tokens == 5)
    assert not pair.dropped
    of_a, of_b = pair.a.machine.pool.hand_over, pair.b.machine.pool.hand_over
    assert (of_a.handed_over, of_a.received, of_b.handed_over, of_b.received, of_a.lost + of_b.lost) == (1, 0, 0, 1, 0)
    assert idle(pair)


def test_pages_that_the_second_runner_has_do_not_travel() -> None:
    pair = Pair()
    begin(pair, PROMPT)
    pair.finish(pair.b)
    pair.sent.clear()
    begin(pair, PROMPT, key="s")
    pair.finish(pair.b)
    assert [s.first_page for s in pair.sent if isinstance(s, ev.SendKv)] == [5]
    assert KvAccept("s", E1, 5) in pair.sent
    found = [side.machine.pool.reuse.tokens for side in (pair.a, pair.b)]
    assert found == [20, 0], "who computes a prompt has found it, who gets its KV has not"
    assert [side.machine.pool.reuse.queried for side in (pair.a, pair.b)] == [2 * len(PROMPT), 0]
    for side in (pair.a, pair.b):
        steps = [one for message in side.said if isinstance(message, Step) for one in message.sequences]
        counts = {one.position: one.cached_tokens for one in steps if one.request_id == "s"}
        assert counts == dict.fromkeys(counts, 0) | {0: 20}, "a gateway may get either runner's first token first"


def test_an_answer_of_one_token_sends_nothing() -> None:
    pair = Pair()
    begin(pair, PROMPT[:3], max_tokens=1)
    pair.step(pair.a)
    assert pair.a.tokens() == expected(PROMPT[:3], 1)
    pair.carry()
    assert not [s for s in pair.sent if isinstance(s, ev.SendKv | KvComplete)]
    pair.do(pair.b, Received(GATEWAY, Stop("r", E1)))
    assert idle(pair)


@given(data=st.data())
def test_whatever_is_lost_and_whenever_both_runners_are_idle_afterwards(data: st.DataObject) -> None:
    """A stream that breaks, a stop at either runner, a session that is over: at any point of the hand-over."""
    pair = Pair(layer_by_layer_tokens=data.draw(st.sampled_from([1, 1000])))
    begin(pair, PROMPT)
    fault_at, what = (
        data.draw(st.integers(0, 30)),
        data.draw(st.sampled_from(["stream", "stop a", "stop b", "gateway"])),
    )
    for turn in range(60):
        if turn == fault_at:
            match what:
                case "stream":
                    pair.lose_stream()
                case "stop a":
                    pair.do(pair.a, Received(GATEWAY, Stop("r", E1)))
                case "stop b":
                    pair.do(pair.b, Received(GATEWAY, Stop("r", E1)))
                case _:
                    pair.do(pair.a, Closed(GATEWAY))
                    pair.do(pair.b, Closed(GATEWAY))
        if data.draw(st.booleans()):
            pair.carry(data.draw(st.integers(1, 4)))
        pair.step(data.draw(st.sampled_from([pair.a, pair.b])))
    for side in (pair.a, pair.b):  # the gateway stops what a runner has ended on the other one
        pair.do(side, Received(GATEWAY, Stop("r", E1)))
    pair.carry()
    got = pair.b.tokens() or pair.a.tokens()
    assert got == expected(PROMPT, len(got)), "whatever came is right"
    assert idle(pair)


def test_a_broken_stream_is_said_by_the_sender_and_by_the_receiver() -> None:
    pair = Pair()
    begin(pair, PROMPT)
    pair.carry()
    pair.step(pair.a)
    pair.lose_stream()
    assert [e.reason for e in (*pair.a.ended(), *pair.b.ended())] == [EndReason.KV_LOST] * 2
    assert [side.machine.pool.hand_over.lost for side in (pair.a, pair.b)] == [1, 1]
    assert idle(pair)


def test_nobody_who_takes_it_in_time_ends_it() -> None:
    pair = Pair()
    pair.do(pair.a, Received(GATEWAY, starts(PROMPT, 6)[0]))
    for _ in range(3):
        pair.step(pair.a)
    pair.carry()
    pair.a.now = pair.b.now = 1.0
    pair.do(pair.a, Received(GATEWAY, starts(PROMPT, 6, "later")[0]))
    for _ in range(3):
        pair.step(pair.a)
    pair.carry()
    for side in (pair.a, pair.b):
        side.now = 1.5
        pair.do(side, TICK)
        assert side.machine.next_deadline() == CLAIM_S, "nothing is left to report"
    pair.a.now = pair.b.now = CLAIM_S
    pair.do(pair.b, TICK)
    pair.do(pair.a, TICK)
    (ended,) = pair.a.ended()
    assert (ended.request_id, ended.reason, ended.epoch) == ("r", EndReason.KV_LOST, E1)
    assert [(s.request_id, s.reason) for s in pair.sent if isinstance(s, KvRefuse)] == [("r", "nobody waits for it")]


def test_an_offer_before_its_start_is_accepted_once_the_start_is_here() -> None:
    pair = Pair()
    on_a, on_b = starts(PROMPT, 6)
    pair.do(pair.a, Received(GATEWAY, on_a))
    pair.carry()
    assert not [s for s in pair.sent if isinstance(s, KvAccept | KvRefuse)]
    pair.do(pair.b, Received(GATEWAY, on_b))
    assert KvAccept("r", E1, 0) in pair.sent
    pair.finish(pair.b)
    assert pair.b.tokens() == expected(PROMPT, 6)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pool": "ns/q"}, "pool"),
        ({"base_digest": "x"}, "base"),
        ({"kv_layout": "x"}, "KV layout"),
        ({"incarnation": "2"}, "incarnation"),
    ],
)
def test_a_runner_of_another_pool_base_layout_or_for_another_incarnation_is_refused(
    fields: dict[str, str], why: str
) -> None:
    pair = Pair()
    pair.do(pair.b, Connected(FROM_A, replace(HELLO, **fields)))
    (closed,) = [s for s in pair.sent if isinstance(s, Close)]
    assert closed.reason.startswith(why)


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (KvOffer("r", Epoch(1, 0), ""), "nobody waits"),
        (KvOffer("r", E1, "sha256:x"), "adapter"),
        (KvOffer("other", E1, ""), ""),
        (KvOffer("waits", E2, ""), "nobody waits"),
    ],
)
def test_an_offer_of_another_epoch_or_adapter_is_refused_by_name(offer: KvOffer, why: str) -> None:
    pair = Pair()
    pair.do(pair.b, Received(GATEWAY, starts(PROMPT, 6)[1]))
    tell_b(pair, KvOffer("waits", E1, ""), offer)
    refusals = [s.reason for s in pair.sent if isinstance(s, KvRefuse)]
    assert bool(refusals) == bool(why)
    assert all(reason.startswith(why) for reason in refusals)


def test_kv_of_another_runner_than_the_awaited_one_is_refused() -> None:
    pair = Pair()
    pair.do(pair.b, Received(GATEWAY, replace(starts(PROMPT, 6)[1], kv_from=RunnerId("ns.c", "1"))))
    tell_b(pair, KvOffer("r", E1, ""))
    assert [s.reason for s in pair.sent if isinstance(s, KvRefuse)] == ["it is awaited from another runner"]


@pytest.mark.parametrize(
    "complete",
    [
        KvComplete("r", E1, 99, (1,)),
        KvComplete("r", E1, 0, (1,)),
        KvComplete("r", E1, 21, ()),
        KvComplete("r", E1, 22, (1, 1)),
        KvComplete("r", E1, 21, (1000,)),
        KvComplete("r", E1, 21, (1,) * 6),
    ],
)
def test_a_complete_that_cannot_be_ends_the_stream_and_the_sequence(complete: KvComplete) -> None:
    pair = Pair()
    pair.do(pair.b, Received(GATEWAY, starts(PROMPT, 6)[1]))
    tell_b(pair, KvOffer("r", E1, ""), complete)
    assert [s for s in pair.sent if isinstance(s, Close)]
    assert [e.reason for e in pair.b.ended()] == [EndReason.KV_LOST]
    assert not [s for s in pair.sent if isinstance(s, KvAck)]
    assert idle(pair)


def test_kv_that_fills_the_smaller_context_of_the_token_runner_ends_the_answer_by_length() -> None:
    pair = Pair()
    pair.b.machine.pool.limits = replace(pair.b.machine.pool.limits, max_context_tokens=len(PROMPT) + 1)
    begin(pair, PROMPT)
    pair.finish(pair.b)
    last = [one for message in pair.b.said for one in message.sequences][-1]
    assert (last.position, last.tokens, last.finish) == (1, (), FinishReason.LENGTH)
    assert pair.b.tokens() == pair.a.tokens() == expected(PROMPT, 1)
    assert not [s for s in pair.sent if isinstance(s, Close)]
    assert idle(pair)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_a_frozen_sequence_continues_on_another_runner_where_it_stopped(steps: int) -> None:
    """Within its prompt, behind it, and at the borders of pages."""
    pair = Pair()
    one = starts(PROMPT, 12)[0]
    pair.do(pair.a, Received(GATEWAY, replace(one, kv_to=None, reservation_tokens=8)))
    for _ in range(steps):
        pair.step(pair.a)
    pair.do(pair.a, Received(GATEWAY, Freeze("r", E1, E2, KvTarget(B, "kv"))))
    (frozen,) = [m for m in pair.a.said if isinstance(m, Frozen)]
    assert pair.a.said[-1] is frozen, "after the last of the tokens"
    emitted = pair.a.tokens()
    assert frozen.emitted_tokens == len(emitted)
    pair.do(pair.b, Received(GATEWAY, replace(one, epoch=E2, emitted=tuple(emitted), kv_to=None, kv_from=A)))
    pair.finish(pair.b)
    assert [*emitted, *pair.b.tokens()] == expected(PROMPT, 12)
    computed = pair.b.machine.pool.figures(ready=True).tokens
    assert computed == len(PROMPT) + 12 - 1 - min(8 * steps, len(PROMPT) + max(0, len(emitted) - 1))
    assert idle(pair)


def test_a_prompt_that_is_frozen_in_its_middle_keeps_the_count_of_its_reused_tokens() -> None:
    pair = Pair()
    one = replace(starts(PROMPT, 2)[0], kv_to=None)
    pair.do(pair.a, Received(GATEWAY, replace(one, request_id="s", prompt=tuple(PROMPT[:9]))))
    pair.finish(pair.a)
    pair.do(pair.a, Received(GATEWAY, one))
    pair.step(pair.a)
    pair.do(pair.a, Received(GATEWAY, Freeze("r", E1, E2, KvTarget(B, "kv"))))
    pair.do(pair.b, Received(GATEWAY, replace(one, epoch=E2, kv_from=A)))
    pair.finish(pair.b)
    first, *_ = [sequence for message in pair.b.said if isinstance(message, Step) for sequence in message.sequences]
    assert (first.position, first.cached_tokens) == (0, 8)


def test_a_runner_that_drains_computes_on_until_its_sequences_have_moved() -> None:
    pair = Pair(kv_claim_s=20.0)
    for name in ("moves", "stays", "sends"):
        one = starts(PROMPT[:8], 40, name)[0]
        pair.do(pair.a, Received(GATEWAY, replace(one, kv_to=None, reservation_tokens=8)))
    pair.do(pair.a, Connected(SUPERVISOR))
    pair.do(pair.a, ev.Drain(True, 8.0))
    pair.step(pair.a)
    pair.do(pair.a, Received(GATEWAY, replace(starts(PROMPT[:4], 4, "late")[0], kv_to=None)))
    assert [(e.request_id, e.reason) for e in pair.a.ended()] == [("late", EndReason.DRAINED)]
    pair.step(pair.a)
    pair.do(pair.a, Received(GATEWAY, Freeze("moves", E1, E2, KvTarget(B, "kv"))))
    moved = replace(starts(PROMPT[:8], 40, "moves", E2)[1], emitted=tuple(expected(PROMPT[:8], 2)))
    pair.do(pair.b, Received(GATEWAY, moved))
    pair.carry()
    assert "moves" not in pair.a.machine.pool.sequences
    for _ in range(2):
        pair.step(pair.a)
    pair.do(pair.a, Received(GATEWAY, Freeze("sends", E1, E2, KvTarget(B, "kv"))))
    pair.a.now = 1.5
    pair.do(pair.a, TICK)
    assert "stays" in pair.a.machine.pool.sequences, "one has left within a second"
    pair.a.now = 3.0
    pair.do(pair.a, TICK)
    assert [e.request_id for e in pair.a.ended()] == ["late", "stays"], "KV that is on its way has all there is"
    pair.a.now = 8.0
    pair.do(pair.a, TICK)
    assert [(e.request_id, e.epoch) for e in pair.a.ended()][2:] == [("sends", E2)]
    assert not pair.a.machine.pool.sequences


@pytest.mark.parametrize(
    "events", [(Connected(SUPERVISOR), Received(SUPERVISOR, RunnerOrder(drain=True))), (ev.Drain(True, 8.0),)]
)
def test_a_drain_for_which_nobody_orders_moves_ends_what_is_here_at_once(events: tuple[Any, ...]) -> None:
    """One that is ordered comes after them, and without a supervisor there are none."""
    pair = Pair()
    pair.do(pair.a, Received(GATEWAY, replace(starts(PROMPT, 6)[0], kv_to=None)))
    for event in events:
        pair.do(pair.a, event)
    assert [e.reason for e in pair.a.ended()] == [EndReason.DRAINED]


@pytest.mark.parametrize("first", ["kv", "adapter"])
def test_a_sequence_whose_kv_comes_runs_once_its_adapter_is_there_too(first: str) -> None:
    pair = Pair()
    on_a, on_b = (replace(one, adapter="x") for one in starts(PROMPT, 6))

    def bring(side: Side) -> None:
        pair.do(side, ev.Fetched("x", None, None))
        pair.do(side, ev.Loaded("x", 1, 1, None, 1.0))

    pair.do(pair.a, Received(GATEWAY, on_a))
    bring(pair.a)
    pair.do(pair.b, Received(GATEWAY, on_b))
    for _ in range(3):
        pair.step(pair.a)
    if first == "adapter":
        bring(pair.b)
    while pair.carry():
        pair.step(pair.b)
    if first == "kv":
        assert pair.b.machine.pool.sequences["r"].phase is SequencePhase.RECEIVE
        bring(pair.b)
    pair.finish(pair.b)
    assert pair.b.tokens() == expected(PROMPT, 6)


def test_a_paused_sequence_is_frozen_and_goes_on_elsewhere() -> None:
    pair = Pair(total_pages=8)
    for key, prompt in (("other", PROMPT[:8]), ("r", PROMPT[:4])):
        one = replace(starts(prompt, 60, key)[0], kv_to=None)
        pair.do(pair.a, Received(GATEWAY, one))
    while not pair.a.machine.pool.reservations.paused:
        pair.step(pair.a)
    (paused,) = pair.a.machine.pool.reservations.paused
    pair.do(pair.a, Received(GATEWAY, Freeze(paused, E1, E2, KvTarget(B, "kv"))))
    assert [m.request_id for m in pair.a.said if isinstance(m, Frozen)] == [paused]
    assert pair.a.machine.pool.sequences[paused].phase is SequencePhase.SEND


def test_a_freeze_of_a_sequence_in_flight_waits_for_its_batch() -> None:
    pair = Pair()
    pair.do(pair.a, Received(GATEWAY, replace(starts(PROMPT[:8], 12)[0], kv_to=None, reservation_tokens=8)))
    (step,) = [e for e in pair.a.machine.handle(ev.StepSlot(2, 2), 0.0) if isinstance(e, ev.RunStep)]
    pair.do(pair.a, Received(GATEWAY, Freeze("r", E1, E2, KvTarget(B, "kv"))))
    assert not pair.a.said
    pair.run(pair.a, step)
    assert [m.emitted_tokens for m in pair.a.said if isinstance(m, Frozen)] == [1]


def test_nothing_to_freeze_is_said_so() -> None:
    pair = Pair()
    pair.do(pair.a, Received(GATEWAY, Freeze("r", E1, E2, KvTarget(B, "kv"))))
    pair.do(pair.a, Received(GATEWAY, replace(starts(PROMPT, 6)[0], kv_to=None)))
    pair.do(pair.a, Received(GATEWAY, Freeze("r", E1, E2, KvTarget(B, "kv"))))
    assert [(e.reason, e.epoch) for e in pair.a.ended()] == [(EndReason.KV_LOST, E1)] * 2
    assert idle(pair)


def test_the_last_pages_that_were_reserved_and_not_sent_are_cleared() -> None:
    """KV of a prompt that was frozen in its middle fills only some of the awaited pages."""
    pair = Pair()
    for page in range(32):
        pair.b.pages[page] = {0: 666}
    one = starts(PROMPT, 6)[0]
    pair.do(pair.a, Received(GATEWAY, replace(one, kv_to=None)))
    pair.step(pair.a)
    pair.do(pair.a, Received(GATEWAY, Freeze("r", E1, E2, KvTarget(B, "kv"))))
    pair.do(pair.b, Received(GATEWAY, replace(one, epoch=E2, kv_to=None, kv_from=A)))
    pair.carry()
    pair.step(pair.b)
    held = pair.b.machine.pool.pages.pages_of("r")
    assert not any(666 in pair.b.pages[page].values() for page in held)


def test_a_token_runner_without_room_says_so_and_refuses_the_kv() -> None:
    pair = Pair(max_sequences=1)
    pair.do(pair.b, Received(GATEWAY, replace(starts(PROMPT, 6, "other")[0], kv_to=None)))
    begin(pair, PROMPT)
    assert [m.reason for m in pair.b.said if isinstance(m, NoCapacity)] == ["sequences"]
    pair.carry()
    assert [e.reason for e in pair.a.ended()] == [EndReason.KV_LOST]


def test_a_prompt_runner_takes_several_prompts_into_a_step_and_says_its_role() -> None:
    pair = Pair(max_sequences=8)
    for key in "pqr":
        pair.do(pair.a, Received(GATEWAY, replace(starts([1, 2], 6, key)[0], kv_to=None)))
    assert len(pair.a.machine.pool.schedule().rows) == 1
    pair.do(pair.a, Received(SUPERVISOR, RunnerOrder(role=RunnerRole.PROMPT)))
    assert len(pair.a.machine.pool.schedule().rows) == 3
    figures = pair.a.machine.pool.figures(ready=True)
    assert (figures.role, figures.pending_prompt_tokens) == (RunnerRole.PROMPT, 6)


def test_a_sequence_that_waits_for_kv_is_no_victim_of_a_swap() -> None:
    pair = Pair(swap_page_bytes=1, total_pages=8)
    pair.do(pair.b, Received(GATEWAY, starts(PROMPT[:8], 6, "waits")[1]))
    pair.do(pair.b, Received(GATEWAY, replace(starts(PROMPT[:4], 30, "runs")[0], kv_to=None, reservation_tokens=4)))
    for _ in range(20):
        pair.step(pair.b)
    assert pair.b.machine.pool.sequences["waits"].phase is SequencePhase.RECEIVE


def test_a_sequence_whose_pages_leave_for_another_runner_is_no_victim_of_a_swap() -> None:
    """A stream reads its pages at any time: they have no other owner before the transfer ends."""
    pair = Pair(swap_page_bytes=1, total_pages=8)
    runs = replace(starts([1, 2, 3, 4], 16, "runs")[0], kv_to=None, reservation_tokens=4)
    pair.do(pair.a, Received(GATEWAY, runs))
    for _ in range(4):
        pair.step(pair.a)
    begin(pair, PROMPT)
    pair.carry()
    pair.step(pair.a)
    assert any(isinstance(sent, ev.SendKv) for sent in pair.sent)
    pair.step(pair.a)
    phases = {key: sequence.phase for key, sequence in pair.a.machine.pool.sequences.items()}
    assert phases == {"runs": SequencePhase.PAUSED, "r": SequencePhase.PREFILL}
    pair.finish(pair.b)
    assert pair.b.tokens() == expected(PROMPT, 6)

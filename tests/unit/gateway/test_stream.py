"""One request's machine: whatever is lost, repeated or late, the text is the undisturbed one, and it ends once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import Send
from weft.domain.request import (
    Allotment,
    Assign,
    Cancel,
    Ended,
    EndReason,
    Failed,
    FailReason,
    FinishReason,
    NoCapacity,
    PooledState,
    Preempt,
    PromptLogprobs,
    Reject,
    RejectReason,
    Sampling,
    SequenceTokens,
    Start,
    Started,
    Stop,
    TokenLogprob,
)
from weft.domain.routes import Route
from weft_gateway.core.events import (
    SCHEDULER,
    ClientGone,
    Emit,
    End,
    Failure,
    FirstToken,
    PreparedRequest,
    RequestAborted,
    TokenLogprobOut,
)
from weft_gateway.core.stream import (
    HoldExpired,
    PoolAvailability,
    RequestStream,
    SessionLost,
    StreamEffect,
    StreamEvent,
    runner_peer,
)

GONE = Failure("no_runner_available", "none")
MOVED = [reason for reason in EndReason if reason is not EndReason.GRAMMAR]  # the request goes on elsewhere
FAULTS = [
    *(lambda epoch, reason=reason: Ended("r", epoch, reason) for reason in MOVED),
    lambda epoch: NoCapacity("r", epoch, 3, "pages"),
]
RUNNERS = [RunnerId("a", "1"), RunnerId("b", "1"), RunnerId("b", "2")]


def letter(token: int) -> bytes:
    """Tokens are bytes: some characters take several."""
    return bytes([token])


def request(
    *,
    max_tokens: int = 100,
    stops: Sequence[str] = (),
    logprobs: bool = False,
    shown: bool = False,
    min_tokens: int = 0,
    scored: int | None = None,
    pooling: bool = False,
    stop_ids: Sequence[int] = (),
    draft: tuple[int, ...] = (),
) -> PreparedRequest:
    return PreparedRequest(
        request_id="r",
        client_request_id="r",
        namespace="acme",
        route=Route("acme/x", "acme", "team/base", "sha256:a"),
        prompt=(1, 2) if scored is None else tuple(range(1, scored + 1)),
        prompt_text="",
        max_tokens=max_tokens,
        draft=draft,
        sampling=Sampling(
            top_logprobs=0 if logprobs else None,
            min_tokens=min_tokens,
            prompt_logprobs=None if scored is None else 2,
            pooling=pooling,
            stop_token_ids=tuple(stop_ids),
        ),
        bytes_of=letter,
        arrived_unix_ms=0,
        stops=tuple(stops),
        include_stop=shown,
    )


def stream(*, hold_s: float = 30.0, now: float = 0.0, available: bool = False, **fields: object) -> RequestStream:
    return RequestStream(request(**fields), 0, hold_s=hold_s, arrived=now, now=now, available=available)  # type: ignore[arg-type]


def assign(counter: int, runner: RunnerId = RUNNERS[0], term: int = 1) -> Assign:
    return Assign("r", Epoch(term, counter), runner, f"{runner.uuid}:1", 8, allotment=Allotment(16, 99))


def started_at(counter: int, runner: RunnerId, emitted: Sequence[int] = ()) -> Send:
    """The Start that an assignment causes."""
    one = request()
    start = Start(
        "r",
        Epoch(1, counter),
        one.prompt,
        tuple(emitted),
        100,
        8,
        "sha256:a",
        one.sampling,
        "acme",
        "r",
        allotment=Allotment(16, 99),
        model_name="acme/x",
    )
    return Send(runner_peer(runner), start)


def began(counter: int) -> list[StreamEffect]:
    """What the first tokens of an epoch cause beside text."""
    return [FirstToken("r"), Send(SCHEDULER, Started("r", Epoch(1, counter)))]


def stopped(counter: int, finish: FinishReason | None = None) -> Send:
    return Send(runner_peer(RUNNERS[0]), Stop("r", Epoch(1, counter), finish))


def sent(effects: Sequence[StreamEffect], *kinds: type) -> list[Any]:
    """The messages of these classes among the effects."""
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kinds)]


def step(
    counter: int, position: int, text: str | bytes, finish: FinishReason | None = None, term: int = 1
) -> SequenceTokens:
    tokens = text.encode() if isinstance(text, str) else text
    return SequenceTokens("r", Epoch(term, counter), position, list(tokens), finish)


def likely(positions: range) -> list[TokenLogprob]:
    """Log probabilities that name their position."""
    return [TokenLogprob(-float(position), ((position, -0.5),)) for position in positions]


def logprobs_of(effects: Sequence[StreamEffect]) -> list[TokenLogprobOut]:
    return [logprob for effect in effects if isinstance(effect, Emit) for logprob in effect.logprobs]


def text_of(effects: Sequence[StreamEffect]) -> str:
    return "".join(effect.text for effect in effects if isinstance(effect, Emit))


def run(
    one: RequestStream, *events: StreamEvent, now: float = 0.0, runner: RunnerId | None = None
) -> list[StreamEffect]:
    """`runner`: that has sent these events."""
    effects: list[StreamEffect] = []
    for event in events:
        effects += one.handle(event, now, runner)
        one.check()
    return effects


def after(*events: StreamEvent, **fields: object) -> RequestStream:
    """A stream that these events have come to."""
    one = stream(**fields)  # type: ignore[arg-type]
    run(one, *events)
    return one


def test_an_undisturbed_request_starts_streams_and_finishes() -> None:
    one = stream()
    effects = run(one, assign(1), step(1, 0, "he"), step(1, 2, "y"), step(1, 3, "", FinishReason.EOS))
    assert effects == [started_at(1, RUNNERS[0]), *began(1), Emit("r", "he", (), 2), Emit("r", "y", (), 3)]
    assert one.end == End(FinishReason.EOS)
    assert (one.migrations, len(one.tokens)) == (0, 3)


def test_a_migration_stops_here_and_starts_there_at_once_with_the_tokens_so_far() -> None:
    one = after(assign(1), step(1, 0, "ab"))
    effects = run(one, assign(2, RUNNERS[1]))
    assert effects == [stopped(1), started_at(2, RUNNERS[1], b"ab")]
    assert run(one, step(1, 2, "X"), step(2, 2, "c")) == [*began(2), Emit("r", "c", (), 3)]
    assert one.migrations == 1


def test_a_lower_epoch_never_takes_over_not_even_after_the_higher_one_broke() -> None:
    one = after(assign(1, term=2), SessionLost(RUNNERS[0]))
    assert run(one, assign(9, term=1), assign(1, term=2)) == []
    assert sent(run(one, assign(2, term=2)), Start)


@pytest.mark.parametrize(
    ("event", "reason", "stops"),
    [
        (Preempt("r", Epoch(1, 1)), FailReason.PREEMPTED, True),
        (SessionLost(RUNNERS[0], "broke"), FailReason.SESSION_LOST, False),
        (NoCapacity("r", Epoch(1, 1), 3, "pages"), FailReason.NO_CAPACITY, False),
        (Ended("r", Epoch(1, 1), EndReason.DRAINED), FailReason.DRAINED, False),
        (Ended("r", Epoch(1, 1), EndReason.UNKNOWN_ADAPTER), FailReason.LOAD_FAILED, False),
        (Ended("r", Epoch(1, 1), EndReason.LOAD_FAILED), FailReason.LOAD_FAILED, False),
        (Ended("r", Epoch(1, 1), EndReason.RUNNER_FULL), FailReason.RUNNER_FULL, False),
        (Ended("r", Epoch(1, 1), EndReason.INTERNAL), FailReason.RUNNER_ERROR, False),
        (step(1, 7, "gap"), FailReason.RUNNER_ERROR, True),
    ],
)
def test_what_ends_an_epoch_is_reported_once_and_the_stream_is_held(
    event: StreamEvent, reason: FailReason, stops: bool
) -> None:
    one = after(assign(1), step(1, 0, "abc"))
    effects = run(one, event)
    assert [type(message) for message in sent(effects, object)] == ([Stop] if stops else []) + [Failed]
    (failed,) = sent(effects, Failed)
    pages = 3 if reason is FailReason.NO_CAPACITY else 0
    assert failed == Failed("r", Epoch(1, 1), reason, 3, pages, failed.detail), "no runner is named where there is one"
    assert one.hold_deadline == 30.0
    assert run(one, event, SessionLost(RUNNERS[0]), Preempt("r", Epoch(1, 1))) == [], "a second trigger is ignored"


@pytest.mark.parametrize(
    ("before", "events"),
    [
        ([assign(1, RUNNERS[1])], [SessionLost(RUNNERS[0]), SessionLost(RUNNERS[2])]),
        ([assign(1), step(1, 0, "a"), Preempt("r", Epoch(1, 1))], [step(1, 1, "b")]),
        ([assign(1), step(1, 0, "abc")], [step(1, 0, "abc"), step(1, 2, "cd")]),
    ],
    ids=["a break of another runner or incarnation", "tokens of an ended epoch", "repeated tokens"],
)
def test_what_is_no_news_changes_nothing(before: list[StreamEvent], events: list[StreamEvent]) -> None:
    one = after(*before)
    tokens = [*one.tokens]
    assert run(one, *events) == []
    assert one.tokens == tokens


def test_a_stop_string_ends_the_request_and_the_tokens_after_it_do_not_count() -> None:
    one = stream(stops=["END"])
    effects = run(one, assign(1), step(1, 0, "well E"), step(1, 6, "NDmore"))
    assert text_of(effects) == "well "
    assert stopped(1, FinishReason.STOP) in effects
    assert one.end == End(FinishReason.STOP, stop="END")
    assert len(one.tokens) == len("well END")


def test_a_stop_string_in_the_runners_last_step_needs_no_stop() -> None:
    one = stream(stops=["c"])
    effects = run(one, assign(1), step(1, 0, "abc", FinishReason.EOS))
    assert (effects[-1], one.end) == (Emit("r", "ab", (), 3), End(FinishReason.STOP, stop="c"))
    assert not sent(effects, Stop)


@pytest.mark.parametrize(("shown", "text"), [(False, "well E"), (True, "well E.")])
def test_a_stop_token_is_a_token_of_the_answer_and_its_text_is_shown_on_request_alone(shown: bool, text: str) -> None:
    one = stream(stops=["END"], shown=shown, stop_ids=b".")
    effects = run(one, assign(1), step(1, 0, "well E"), step(1, 6, ".", FinishReason.STOP))
    assert (text_of(effects), one.end) == (text, End(FinishReason.STOP, stop=ord(".")))
    assert bytes(one.tokens) == b"well E."
    assert not sent(effects, Stop)


def test_a_stop_token_has_its_log_probability_and_what_it_cuts_short_is_shown() -> None:
    one = stream(logprobs=True)
    last = step(1, 1, b"\xc3.", FinishReason.STOP)._replace(logprobs=likely(range(1, 3)))
    effects = run(one, assign(1), step(1, 0, "a")._replace(logprobs=likely(range(1))), last)
    assert text_of(effects) == "a\N{REPLACEMENT CHARACTER}"
    assert [out.token for out in logprobs_of(effects)] == [*b"a\xc3."]


def scores(counter: int, first: int, n: int) -> PromptLogprobs:
    """Log probabilities that name their position in the prompt."""
    return PromptLogprobs("r", Epoch(1, counter), first, likely(range(first, first + n)))


def asked(effects: Sequence[StreamEffect]) -> list[int | None]:
    return [start.sampling.prompt_logprobs for start in sent(effects, Start)]


def reported(effects: Sequence[StreamEffect]) -> list[object]:
    return [effect.prompt_logprobs for effect in effects if isinstance(effect, Emit) and effect.prompt_logprobs]


def test_log_probabilities_of_a_prompt_are_reported_once_before_its_text() -> None:
    one = stream(scored=5)
    effects = run(one, assign(1), scores(1, 1, 2), scores(1, 3, 4), step(1, 0, "ab"), step(1, 2, "c"))
    assert asked(effects) == [2]
    assert reported(effects) == [[None, *likely(range(1, 5))]]
    first, *texts = [effect for effect in effects if isinstance(effect, Emit)]
    assert (first.text, first.answer_tokens, [emit.text for emit in texts]) == ("", 0, ["ab", "c"])


def test_a_moved_prompt_is_scored_again_as_long_as_a_part_is_missing_and_then_no_more() -> None:
    one = stream(scored=5)
    effects = run(
        one, assign(1), scores(1, 1, 2), Preempt("r", Epoch(1, 1)), scores(1, 3, 2), assign(2), scores(2, 1, 4),
        Preempt("r", Epoch(1, 2)), assign(3), step(3, 0, "a"), Preempt("r", Epoch(1, 3)), assign(4), step(4, 1, "b"),
    )  # fmt: skip
    assert asked(effects) == [2, 2, None, None]
    assert reported(effects) == [[None, *likely(range(1, 5))]]
    assert text_of(effects) == "ab"


def test_a_runner_that_leaves_out_a_part_of_a_prompt_has_failed() -> None:
    for broken in ([scores(1, 1, 1), scores(1, 3, 2)], [scores(1, 1, 3), step(1, 0, "a")]):
        one = stream(scored=5)
        effects = run(one, assign(1), *broken)
        (failed,) = sent(effects, Failed)
        assert (failed.reason, one.tokens) == (FailReason.RUNNER_ERROR, [])
        assert "of the prompt" in failed.detail
        one.check()


@pytest.mark.parametrize("prompt", [1, 3])
def test_a_request_for_its_prompt_alone_ends_without_a_token(prompt: int) -> None:
    one = stream(scored=prompt, max_tokens=0)
    effects = run(one, assign(1), *([scores(1, 1, 2)] if prompt > 1 else []), step(1, 0, "", FinishReason.LENGTH))
    assert reported(effects) == [[None, *likely(range(1, prompt))]]
    assert (one.tokens, one.end, text_of(effects)) == ([], End(FinishReason.LENGTH), "")


def test_a_hidden_state_is_reported_at_the_end_and_a_runner_that_sends_none_has_failed() -> None:
    ended, pooled = step(1, 0, "", FinishReason.LENGTH), PooledState("r", Epoch(1, 1), b"1234")
    for events, whole in (([pooled, ended], True), ([ended], False), ([replace(pooled, vector=b"123"), ended], False)):
        one = stream(pooling=True, max_tokens=0)
        effects = run(one, assign(1), *events)
        states = [effect.state for effect in effects if isinstance(effect, Emit)]
        assert states == ([b"1234"] if whole else [])
        assert one.end == (End(FinishReason.LENGTH) if whole else None)
        assert [one.reason for one in sent(effects, Failed)] == ([] if whole else [FailReason.RUNNER_ERROR])
        one.check()


def test_a_moved_text_is_pooled_by_the_runner_that_has_it() -> None:
    one, stale = stream(pooling=True, max_tokens=0), PooledState("r", Epoch(1, 1), b"1111")
    new, ended = PooledState("r", Epoch(1, 2), b"2222"), step(2, 0, "", FinishReason.LENGTH)
    effects = run(one, assign(1), Preempt("r", Epoch(1, 1)), stale, assign(2), new, stale, ended)
    assert [effect.state for effect in effects if isinstance(effect, Emit)] == [b"2222"]


def test_a_prompt_is_scored_for_the_first_of_several_answers_alone() -> None:
    both = replace(request(scored=3), n=2)
    ones = [RequestStream(both, index, hold_s=30.0, arrived=0.0, now=0.0) for index in range(2)]
    starts = [start for one in ones for start in sent(run(one, assign(1)), Start)]
    assert [(start.sampling.choice, start.sampling.prompt_logprobs) for start in starts] == [(0, 2), (1, None)]


@pytest.mark.parametrize(
    ("fields", "first", "last", "finish", "text"),
    [
        ({"stops": ["END", "ND"], "shown": True}, "well E", "NDmore", None, "well END"),
        ({"stops": ["ab"], "min_tokens": 3}, "abab", "cabd", None, "ababc"),
        ({"stops": ["END"]}, "the EN", "", FinishReason.EOS, "the EN"),
    ],
    ids=["shown on request", "none that begins within min_tokens", "held back until the end"],
)
def test_text_around_a_stop_string(
    fields: dict[str, Any], first: str, last: str, finish: FinishReason | None, text: str
) -> None:
    assert text_of(run(stream(**fields), assign(1), step(1, 0, first), step(1, len(first), last, finish))) == text


def test_a_runner_that_overshoots_max_tokens_is_cut_and_stopped() -> None:
    one = stream(max_tokens=3)
    effects = run(one, assign(1), step(1, 0, "ab"), step(1, 2, "cdef"))
    assert text_of(effects) == "abc"
    assert one.end == End(FinishReason.LENGTH)
    assert stopped(1, FinishReason.LENGTH) in effects


def test_a_client_that_goes_away_stops_the_runner_and_cancels_at_the_scheduler() -> None:
    one = after(assign(1))
    assert run(one, ClientGone("r")) == [stopped(1, FinishReason.CANCELLED), Send(SCHEDULER, Cancel("r"))]
    assert one.end == End(FinishReason.CANCELLED)
    assert run(one, ClientGone("r"), assign(2), step(1, 0, "a"), RequestAborted("r", GONE)) == []


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        (RejectReason.QUEUE_FULL, "queue_full", "The queue of this model's pool is full."),
        (RejectReason.TOO_LARGE, "too_large", "The request does not fit the largest runner of its pool."),
        (RejectReason.UNKNOWN_POOL, "model_not_found", "The model's pool does not exist any more."),
        (RejectReason.UNKNOWN_ADAPTER, "model_not_found", "The model was deleted while the request waited."),
        (RejectReason.TOO_MANY_MIGRATIONS, "too_many_migrations", "The request was migrated too many times."),
        (RejectReason.ADAPTER_FAILED, "adapter_failed", "No runner could load the model's adapter."),
        (RejectReason.RUNNER_FULL, "runner_full", "Storage is full: no runner has room for the model's adapter."),
    ],
)
def test_a_rejection_is_the_end_with_its_name(reason: RejectReason, code: str, message: str) -> None:
    one = stream()
    assert run(one, Reject("r", reason, "4 wait.", 500)) == []
    assert one.end == End(FinishReason.FAILED, Failure(code, f"{message} 4 wait.", 500))


def test_a_stream_is_held_for_the_hold_time_and_not_longer() -> None:
    one = stream(hold_s=30.0, now=100.0)
    assert one.handle(HoldExpired(GONE), 129.9) == []
    assert one.handle(HoldExpired(GONE), 130.0) == [Send(SCHEDULER, Cancel("r"))]
    assert one.end == End(FinishReason.FAILED, GONE)


def test_the_hold_does_not_run_while_a_runner_has_the_request_and_is_full_again_once_it_ran() -> None:
    one = stream(hold_s=30.0)
    for now, event, deadline in (
        (10.0, assign(1), None),
        (11.0, NoCapacity("r", Epoch(1, 1), 3, "pages"), 31.0),  # 10 s are used up
        (21.0, assign(2), None),
        (90.0, HoldExpired(GONE), None),
        (100.0, SessionLost(RUNNERS[0]), 110.0),  # 20 s are used up
        (109.0, assign(3), None),
        (110.0, step(3, 0, "a"), None),
        (120.0, SessionLost(RUNNERS[0]), 150.0),
    ):
        effects = one.handle(event, now)
        assert one.hold_deadline == deadline, event
        assert (effects == []) == isinstance(event, HoldExpired)


QUEUED = [NoCapacity("r", Epoch(1, 1), 3, "pages"), Preempt("r", Epoch(1, 1))]
BROKEN = [SessionLost(RUNNERS[0]), *(Ended("r", Epoch(1, 1), reason) for reason in MOVED)]


@pytest.mark.parametrize("event", QUEUED)
def test_the_hold_of_a_stream_that_queues_counts_only_while_its_pool_is_not_served(event: StreamEvent) -> None:
    one = after(PoolAvailability(True), assign(1), step(1, 0, "a"), event, hold_s=30.0)
    assert one.hold_deadline is None
    assert run(one, HoldExpired(GONE), now=1000.0) == []
    run(one, PoolAvailability(False), now=1000.0)
    assert one.hold_deadline == 1030.0
    run(one, PoolAvailability(True), now=1010.0)
    assert one.hold_deadline is None
    run(one, PoolAvailability(False), now=2000.0)
    assert one.hold_deadline == 2020.0  # 10 s are used up


@pytest.mark.parametrize("event", BROKEN)
def test_the_hold_of_a_stream_that_lost_its_runner_runs_though_its_pool_is_available(event: StreamEvent) -> None:
    one = after(PoolAvailability(True), assign(1), step(1, 0, "a"), event, hold_s=30.0)
    assert one.hold_deadline == 30.0


def test_a_grammar_that_fails_ends_the_request_by_name_at_once() -> None:
    one = stream()
    effects = run(one, assign(1), step(1, 0, "a"), Ended("r", Epoch(1, 1), EndReason.GRAMMAR, "it cannot go on", 1))
    assert one.end.failure == Failure("grammar_failed", "it cannot go on", 0)
    assert Send(SCHEDULER, Cancel("r", 1)) in effects


def test_a_new_request_may_queue_as_long_as_its_pool_is_served() -> None:
    one = stream(max_tokens=9, available=True)
    assert one.hold_deadline is None
    run(one, PoolAvailability(False), now=50.0)
    assert one.hold_deadline == 80.0


def test_a_preempted_stream_survives_a_queue_of_any_length() -> None:
    one = after(PoolAvailability(True), hold_s=30.0)
    for counter in range(1, 20):
        now = counter * 100.0
        run(one, assign(counter), step(counter, counter - 1, "a"), Preempt("r", Epoch(1, counter)), now=now)
        assert run(one, HoldExpired(GONE), now=now + 99.0) == []
    assert (one.end, one.migrations, one.counted_migrations) == (None, 18, 0)


def test_only_what_the_system_did_not_do_itself_is_a_counted_migration() -> None:
    one = stream()
    for counter, ends in enumerate(FAULTS, 1):
        run(one, assign(counter), ends(Epoch(1, counter)))
    assert (one.migrations, one.counted_migrations) == (len(FAULTS) - 1, len(MOVED))
    run(one, assign(50), assign(51))
    assert one.counted_migrations == len(MOVED) + 1, "migrated without a Failed: the Assign had expired"


def test_an_epoch_that_the_system_ended_is_a_preemption_unless_the_runner_never_began_it() -> None:
    one = after(assign(1), Preempt("r", Epoch(1, 1)), assign(2), NoCapacity("r", Epoch(1, 2), 0, "pages"))
    assert one.preemptions == 1, "a refusal is none"
    run(one, assign(3), step(3, 0, "a"), NoCapacity("r", Epoch(1, 3), 0, "pages"), Preempt("r", Epoch(1, 3)))
    assert one.preemptions == 2, "given back with a token is one"
    run(one, assign(4), SessionLost(RUNNERS[0]))
    assert (one.preemptions, one.counted_migrations) == (2, 1)


def test_an_epoch_knows_where_it_began() -> None:
    one = after(assign(1), step(1, 0, "abc"), Preempt("r", Epoch(1, 1)), assign(2), step(2, 3, "de"))
    assert (one.start_tokens, len(one.tokens)) == (3, 5)


def test_doublings_add_up_over_epochs() -> None:
    one = after(assign(1), SequenceTokens("r", Epoch(1, 1), 0, [97], None, 2), assign(2))
    assert one.doublings == 2
    run(one, SequenceTokens("r", Epoch(1, 2), 1, [98], None, 1))
    assert one.doublings == 3


def test_the_tokens_that_the_first_runner_reused_are_those_of_the_answer() -> None:
    """A later runner may find what this request itself has computed. No runner reuses more than the prompt."""
    for reported, counted in ((1, 1), (9, 2)):
        one = after(assign(1))
        first = SequenceTokens("r", Epoch(1, 1), 0, [97], cached_tokens=reported)
        later = SequenceTokens("r", Epoch(1, 2), 1, [98], cached_tokens=2)
        effects = run(one, first, assign(2), later)
        assert [effect for effect in effects if isinstance(effect, FirstToken)] == [FirstToken("r", counted)] * 2


def test_log_probabilities_that_were_not_asked_for_are_not_sent() -> None:
    tokens = SequenceTokens("r", Epoch(1, 1), 0, b"a", FinishReason.EOS, logprobs=likely(range(1)))
    assert Emit("r", "a", (), 1) in run(stream(), assign(1), tokens)


@pytest.mark.parametrize("came", [0, 1, 3])
def test_a_runner_whose_log_probabilities_are_not_as_many_as_its_tokens_is_given_up(came: int) -> None:
    one = stream(max_tokens=9, logprobs=True)
    effects = run(one, assign(1), SequenceTokens("r", Epoch(1, 1), 0, b"ab", logprobs=likely(range(came))))
    assert [type(message) for message in sent(effects, object)] == [Start, Stop, Failed]
    assert [failed.reason for failed in sent(effects, Failed)] == [FailReason.RUNNER_ERROR]
    assert one.tokens == [], "none of them counts"


# ---------------------------------------------------------------- the law, under disturbance


class Disturbed:
    """A scheduler, runners and a network that do what they may, by a seed: crash, move, repeat, reorder, lose."""

    def __init__(self, answer: bytes, stops: Sequence[str], max_tokens: int, seed: int) -> None:
        self.answer, self.random = answer[:max_tokens], random.Random(seed)
        self.ends = FinishReason.EOS if len(answer) < max_tokens else FinishReason.LENGTH
        self.one = stream(max_tokens=max_tokens, stops=stops, logprobs=True)
        self.effects: list[StreamEffect] = []
        self.past: list[StreamEvent] = []
        self.counter, self.term = 0, 1
        self.runs: dict[Epoch, int] = {}  # epoch -> the runner's next position

    def send(self, event: StreamEvent) -> None:
        self.past.append(event)
        effects = self.one.handle(event, 0.0)
        self.one.check()
        for start in sent(effects, Start):
            self.runs[start.epoch] = len(start.emitted)
        self.effects += effects

    def assign(self) -> None:
        self.counter += 1
        if self.random.random() < 0.1:
            self.term, self.counter = self.term + 1, 1
        self.send(assign(self.counter, self.random.choice(RUNNERS), self.term))

    def generate(self, epoch: Epoch) -> None:
        """One iteration of the runner that has (or thinks it has) this epoch."""
        at = self.runs[epoch]
        tokens = list(self.answer[at : at + self.random.randint(0, 3)])
        self.runs[epoch] = at + len(tokens)
        ends = self.ends if at + len(tokens) == len(self.answer) else None
        self.send(SequenceTokens("r", epoch, at, tokens, ends, logprobs=likely(range(at, at + len(tokens)))))

    def disturb(self) -> None:
        running = self.one.running
        match self.random.randrange(9):
            case 0:
                self.assign()
            case 1 if running:
                self.send(Preempt("r", running.epoch))
            case 2:
                self.send(SessionLost(self.random.choice(RUNNERS)))
            case 3 if running:
                self.send(self.random.choice(FAULTS)(running.epoch))
            case 4 if self.past:
                self.send(self.random.choice(self.past))  # late or repeated
            case 5 if self.runs:
                self.generate(self.random.choice(list(self.runs)))  # a runner that the Stop reaches too late
            case 6 if running:
                self.runs[running.epoch] += 1  # a lost step: the next one leaves a gap
            case 7:
                self.send(PoolAvailability(self.random.random() < 0.5))
            case _:
                self.send(HoldExpired(GONE))

    def finish(self) -> None:
        for _ in range(4 * len(self.answer) + 20):
            if self.one.end:
                return
            if not self.one.running:
                self.assign()
            assert self.one.running
            self.generate(self.one.running.epoch)


@given(
    answer=st.text("abcé東\N{SLIGHTLY SMILING FACE}", max_size=20).map(str.encode),
    stops=st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 60),
    disturbances=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_the_text_is_that_of_an_undisturbed_run_and_the_request_ends_once(
    answer: bytes, stops: list[str], max_tokens: int, disturbances: int, seed: int
) -> None:
    calm, rough = (Disturbed(answer, stops, max_tokens, seed) for _ in range(2))
    calm.finish()
    for _ in range(disturbances):
        rough.disturb()
        if rough.one.running and rough.random.random() < 0.5:
            rough.generate(rough.one.running.epoch)
    rough.finish()
    assert text_of(rough.effects) == text_of(calm.effects)
    assert logprobs_of(rough.effects) == logprobs_of(calm.effects)
    assert rough.one.tokens == calm.one.tokens
    assert rough.one.end == calm.one.end
    assert rough.one.end is not None
    assert all(rough.one.handle(event, 0.0) == [] for event in rough.past), "nothing after the end"


@given(
    seed=st.integers(0, 2**32),
    end=st.sampled_from([ClientGone("r"), Reject("r", RejectReason.TOO_LARGE), RequestAborted("r", GONE)]),
)
def test_every_started_epoch_is_stopped_failed_or_finished_whatever_ends_it(seed: int, end: StreamEvent) -> None:
    world = Disturbed(b"a long enough answer", [], 100, seed)
    for _ in range(world.random.randint(0, 30)):
        world.disturb()
    world.send(end)
    started = [start.epoch for start in sent(world.effects, Start)]
    ended = {message.epoch for message in sent(world.effects, Stop, Failed)}
    finished_by_runner = world.one.end is not None and world.one.end.reason is FinishReason.EOS
    assert set(started) - ended <= ({started[-1]} if finished_by_runner else set())
    failed = [message.epoch for message in sent(world.effects, Failed)]
    assert len(failed) == len(set(failed)), "an epoch fails once"
    assert world.one.end is not None


def test_the_numerics_class_is_that_of_the_latest_tokens() -> None:
    one, seen = stream(), list[str]()
    for event in (
        replace(assign(1), numerics_class="a"),
        step(1, 0, "x"),
        Preempt("r", Epoch(1, 1)),
        replace(assign(2, RUNNERS[1]), numerics_class="b"),
        step(2, 1, "y"),
        replace(assign(3), numerics_class="a"),
    ):
        one.handle(event, 0.0)
        seen.append(one.numerics_class)
    assert seen == ["", "a", "a", "a", "b", "b"]

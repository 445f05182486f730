"""The gateway's machine: holds, admission, sessions, outcomes and drain, each by its events, effects and deadlines."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Close, Closed, Connected, Received, Send
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import (
    Assign,
    Cancel,
    Ended,
    EndReason,
    Failed,
    FailReason,
    FinishReason,
    NoCapacity,
    Outcome,
    OutcomeAck,
    OutcomeReport,
    Preempt,
    Priority,
    ResubmitComplete,
    RunnerChecked,
    RunnerGone,
    Sampling,
    SequenceTokens,
    Start,
    Step,
    Stop,
    Submit,
)
from weft.domain.routes import PoolRoute, ResyncRoutes, Route, Routes, RoutesApplied
from weft_gateway.core import Gateway, GatewayConfig
from weft_gateway.core.admission import Answer
from weft_gateway.core.events import (
    PREDICTOR,
    SCHEDULER,
    CheckSession,
    ClientGone,
    Drained,
    DrainStarted,
    Effect,
    Emit,
    Event,
    Finish,
    OpenSession,
    OutcomeDropped,
    PeerViolation,
    PreparedRequest,
    Proceed,
    Refuse,
    RequestFailed,
    RequestHeld,
    RequestReady,
    RoutesChanged,
    SessionAlive,
    Submitted,
    TokenizerChanged,
    TokenizerState,
)
from weft_gateway.core.stream import runner_peer

CONFIG = GatewayConfig(max_in_flight=8, hold_s=30.0, predict_s=0.05, connect_s=5.0, session_idle_s=60.0)
DRAIN_S = 10.0
FIRST, SECOND, REBORN = RunnerId("a", "1"), RunnerId("b", "1"), RunnerId("a", "2")
TABLE = Routes(
    version=1,
    full=True,
    routes=(Route("acme/x", "acme", "team/base", "sha256:a"), Route("tiny", "team", "team/other", "")),
    pools=(PoolRoute("team/base", "sha256:t", "tiny", 512, 1), PoolRoute("team/other", "sha256:t", "tiny", 512, 1)),
)


class Shell:
    """A machine with its clock, and every effect so far."""

    def __init__(self, config: GatewayConfig = CONFIG) -> None:
        self.machine = Gateway(config, "gateway-1", lambda outcome: repr(outcome).encode())
        self.now = 100.0
        self.effects: list[Effect] = []
        self.counter = 0

    def feed(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            effects += self.machine.handle(event, self.now)
            self.machine.check()
        self.effects += effects
        return effects

    def ready(self) -> "Shell":
        self.feed(Connected(SCHEDULER), Received(SCHEDULER, TABLE), TokenizerChanged("sha256:t", TokenizerState.READY))
        return self

    def wait(self, seconds: float) -> list[Effect]:
        """Time passes; deadlines are kept."""
        end, effects = self.now + seconds, list[Effect]()
        while (at := self.machine.next_deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            effects += self.feed(TICK)
        self.now = end
        return effects

    def answered(self, answer: Answer) -> list[Effect]:
        """What becomes of a step: a request that is told to wait does so."""
        return self.feed(answer) if isinstance(answer, RequestHeld) else [answer]

    def arrive(self, request_id: str, n: int | None = None, priority: Priority = Priority.INTERACTIVE) -> list[Effect]:
        """Let a request arrive and, with `n`, find its model and want `n` answers of it."""
        admission = self.machine.admission
        effects = self.answered(admission.arrive(request_id, priority, self.now))
        if n is not None:
            effects += self.answered(admission.resolve(request_id, "team/base", n, priority, self.now))
        return effects

    def submit(
        self,
        request_id: str = "r",
        n: int = 1,
        model: int = 0,
        priority: Priority = Priority.INTERACTIVE,
        **fields: object,
    ) -> list[Effect]:
        self.arrive(request_id, n, priority)
        request = prepared(request_id, n, route=TABLE.routes[model], **fields)
        return self.feed(RequestReady([request]), Received(PREDICTOR, Prediction(request_id, 7, 21, "v1")))

    def assign(self, request_id: str = "r", runner: RunnerId = FIRST) -> list[Effect]:
        self.counter += 1
        return self.feed(Received(SCHEDULER, Assign(request_id, Epoch(1, self.counter), runner, "host:1", 8)))

    def run(self, request_id: str = "r", runner: RunnerId = FIRST) -> list[Effect]:
        return self.assign(request_id, runner) + self.feed(Connected(runner_peer(runner)))

    def step(self, text: bytes, finish: FinishReason | None = None, request_id: str = "r", **by: RunnerId) -> list[Any]:
        """The next tokens of a running request."""
        stream = self.machine.requests[request_id]
        assert stream.running
        tokens = SequenceTokens(request_id, stream.running.epoch, len(stream.tokens), text, finish)
        return self.feed(Received(runner_peer(by.get("by", stream.running.runner)), Step(1, [tokens])))


def bytes_of(token: int) -> bytes:
    if token == 0xFF:
        raise ZeroDivisionError("a bug that this token hits")
    return bytes([token])


def prepared(request_id: str = "r", n: int = 1, **fields: Any) -> PreparedRequest:
    request = PreparedRequest(
        request_id, request_id, "acme", TABLE.routes[0], (1, 2), "text", 100, Sampling(), bytes_of, 5_000, n=n
    )
    return replace(request, **fields)


def running(*names: str, runner: RunnerId = FIRST) -> Shell:
    """A machine with these requests on a runner."""
    shell = Shell().ready()
    for name in names or ("r",):
        shell.submit(name)
        shell.run(name, runner)
    return shell


def sent(effects: Sequence[Effect], *kinds: type) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kinds)]


def of(effects: Sequence[Effect], *kinds: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kinds)]


# ---------------------------------------------------------------- before the submission


def test_the_first_requests_wait_for_the_route_table() -> None:
    shell = Shell()
    assert shell.arrive("r") == []
    effects = shell.feed(Connected(SCHEDULER), Received(SCHEDULER, TABLE))
    assert of(effects, Proceed, RoutesChanged) == [RoutesChanged(True), Proceed("r")]
    assert shell.arrive("s") == [Proceed("s")]
    assert shell.machine.next_deadline() is None


def test_a_request_does_not_wait_for_what_has_come_before_its_hold_begins() -> None:
    shell = Shell()
    held = shell.machine.admission.arrive("r", Priority.INTERACTIVE, shell.now)
    assert held == RequestHeld("r")
    shell.feed(Connected(SCHEDULER), Received(SCHEDULER, TABLE))
    assert shell.answered(held) == [Proceed("r")]
    shell.feed(ClientGone("r"))
    assert shell.answered(held) == []
    assert (shell.machine.admission.in_flight, shell.machine.next_deadline()) == (0, None)


def test_the_prompts_of_a_call_are_counted_at_once_and_submitted_each_by_itself() -> None:
    shell = Shell().ready()
    shell.arrive("r", 4)
    assert shell.machine.admission.in_flight == 4
    now = shell.now
    asked = sent(shell.feed(RequestReady([prepared(name, 2) for name in ("r", "r.1")])), PredictItem)
    assert [one.request_id for one in asked] == ["r", "r.1"]
    shell.now += 0.01
    effects = shell.feed(Received(PREDICTOR, Prediction("r.1", 7, 21)), ClientGone("r"))
    assert [one.request_id for one in of(effects, Finish)] == ["r/0", "r/1"]
    assert [one.arrived for one in shell.machine.requests.values()] == [now, now]
    assert shell.machine.admission.in_flight == 2


def test_a_hold_for_routes_ends_by_its_deadline() -> None:
    shell = Shell()
    assert shell.arrive("gone") + shell.arrive("r") == []
    shell.feed(ClientGone("gone"))
    assert shell.wait(29.9) == []
    (refusal,) = of(shell.wait(0.2), Refuse)
    assert (refusal.failure.code, shell.machine.admission.in_flight) == ("no_scheduler", 0)


@pytest.mark.parametrize(
    ("state", "effect"),
    [(TokenizerState.READY, Proceed), (TokenizerState.FAILED, Refuse), (TokenizerState.REMOVED, Refuse)],
)
def test_a_request_waits_for_its_tokenizer_until_its_load_is_over(state: TokenizerState, effect: type) -> None:
    shell = Shell()
    shell.feed(Connected(SCHEDULER), Received(SCHEDULER, TABLE))
    assert shell.arrive("r", 1) == [Proceed("r")], "and no more"
    admission = shell.machine.admission
    assert admission.not_ready_reason() == "loading the tokenizer of sha256:t"
    assert shell.feed(TokenizerChanged("sha256:t", TokenizerState.LOADING, "the depot is away")) == []
    assert admission.not_ready_reason() == "no tokenizer could be loaded: the depot is away"
    assert shell.wait(29.9) == []
    (answer,) = shell.feed(TokenizerChanged("sha256:t", state, "no JSON"))
    assert type(answer) is effect
    assert not isinstance(answer, Refuse) or "no JSON" in answer.failure.message
    assert (admission.not_ready_reason() is None) == (state is not TokenizerState.REMOVED)
    later = PoolRoute("team/new", "sha256:new", "new", 512, 1)
    shell.feed(Received(SCHEDULER, Routes(2, False, 1, pools=(later,))))
    assert (admission.not_ready_reason() is None) == (state is TokenizerState.READY), "a new pool takes nobody away"


def test_at_most_a_quarter_of_all_requests_waits_for_one_tokenizer() -> None:
    shell = Shell(replace(CONFIG, max_in_flight=20))
    shell.feed(Connected(SCHEDULER), Received(SCHEDULER, TABLE))
    for name in "abcdef":
        effects = shell.arrive(name, 1)
        assert [type(effect) for effect in effects] == [Proceed] + [Refuse] * (name == "f")
    assert shell.machine.admission.waiting_for_tokenizer("sha256:t") == 5
    (refusal,) = of(effects, Refuse)
    shell.feed(ClientGone("a"))
    assert len(shell.feed(TokenizerChanged("sha256:t", TokenizerState.READY))) == 4
    shell.feed(TokenizerChanged("sha256:t", TokenizerState.REMOVED))
    assert shell.arrive("s", 1) == [Proceed("s")], "it may come again"
    assert refusal.failure.message == "The tokenizer of pool team/base is not available: it is being loaded."


def test_beyond_the_bound_each_refused_request_is_given_a_time_of_its_own_to_come_back() -> None:
    shell = Shell()
    shell.now = 0.0
    shell.ready()
    for index in range(4):
        shell.submit(f"r{index}", n=2)

    def refused() -> int:
        (refusal,) = of(shell.arrive("more", 2), Refuse)
        assert refusal.failure.code == "rate_limit_exceeded"
        return refusal.failure.retry_after_ms

    waits = [refused() for _ in range(16)]
    assert waits == [1000] * 8 + [1125, 1250, 1375, 1500, 1625, 1750, 1875, 2000]  # a place every 1 s / 8
    shell.now += 4.0
    shell.feed(ClientGone("r0"))  # two answers of 4 s: the mean is 1.2925 s now
    assert shell.arrive("last", 2) == [Proceed("last")] * 2
    assert max(refused() for _ in range(500)) == 60_000
    shell.now += 60.0
    assert [refused() for _ in range(8)][-1] == 1293


def test_lines_of_batches_take_no_place_of_interactive_requests_and_have_a_bound_of_their_own() -> None:
    shell = Shell().ready()
    for line in range(8):
        shell.submit(f"line{line}", priority=Priority.BATCH)
    refused = shell.arrive("more", 1, Priority.BATCH)
    assert [type(one) for one in refused] == [Proceed, Refuse]
    shell.submit("r", n=8)
    assert (shell.machine.admission.in_flight, shell.machine.admission.batch) == (16, 8)
    assert [type(one) for one in shell.arrive("s", 1)][1] is Refuse
    shell.feed(ClientGone("line0"))
    assert shell.arrive("more", None, Priority.BATCH)[0] == Proceed("more")


def test_a_line_of_a_batch_keeps_its_priority_on_its_way_and_waits_for_a_runner_without_a_bound() -> None:
    shell = Shell().ready()
    effects = shell.submit("line", priority=Priority.BATCH)
    assert [one.priority for one in sent(effects, Submit)] == [Priority.BATCH]
    assert [one.priority for one in sent(shell.run("line"), Start)] == [Priority.BATCH]
    shell.feed(Closed(runner_peer(FIRST), "broke"), Closed(SCHEDULER, "broke"))
    assert shell.machine.requests["line"].hold_deadline is None
    assert [one.priority for one in sent(shell.feed(Connected(SCHEDULER)), Submit)] == [Priority.BATCH]


def test_a_prediction_is_made_once_for_all_answers_and_a_late_one_counts_no_more() -> None:
    shell = Shell().ready()
    shell.arrive("r", 2)
    asked = sent(shell.feed(RequestReady([prepared(n=2)])), PredictItem)
    assert asked == [PredictItem("r", "text", "team/base", "acme/x", 2, 100, "acme")]
    assert shell.machine.next_deadline() == shell.now + 0.05
    submits = sent(shell.wait(0.05), Submit)
    assert [(one.request_id, one.p50_tokens) for one in submits] == [("r/0", 0), ("r/1", 0)]
    assert shell.feed(Received(PREDICTOR, Prediction("r", 7, 21))) == []


def test_a_gateway_that_was_late_itself_waits_once_more_for_a_prediction() -> None:
    shell = Shell().ready()
    for name in ("answered", "silent"):
        shell.arrive(name, 1)
        shell.feed(RequestReady([prepared(name)]))
    shell.now += 0.4  # the loop was busy: the deadline of 0.05 s is noticed now
    assert shell.feed(TICK) == []
    effects = shell.feed(Received(PREDICTOR, Prediction("answered", 1, 1)))
    shell.now += 0.4
    effects += shell.feed(TICK)
    submits = sent(effects, Submit)
    assert [(one.request_id, one.p50_tokens) for one in submits] == [("answered", 1), ("silent", 0)]
    assert [one.predicted for one in of(effects, Submitted)] == [True, False]


def test_a_client_that_goes_away_while_its_request_is_predicted_leaves_one_outcome_for_each_answer() -> None:
    shell = Shell().ready()
    shell.arrive("r", 2)
    effects = shell.feed(RequestReady([prepared(n=2)]), ClientGone("r"))
    assert [finish.end.reason for finish in of(effects, Finish)] == [FinishReason.CANCELLED] * 2
    assert shell.feed(Received(PREDICTOR, Prediction("r", 7, 21))) == []
    assert (shell.machine.admission.in_flight, shell.machine.next_deadline()) == (0, None)


# ---------------------------------------------------------------- runners


def test_a_session_opens_for_the_first_assignment_and_closes_when_it_is_idle_for_long() -> None:
    shell = Shell().ready()
    shell.submit()
    effects = shell.assign()
    assert [type(one) for one in effects] == [OpenSession, Send]
    shell.feed(Connected(runner_peer(FIRST)))
    assert shell.wait(1000.0) == [], "a session that is used has no deadline"
    shell.step(b"ab", FinishReason.EOS)
    assert shell.wait(59.0) == []
    assert of(shell.wait(2.0), Close) == [Close(runner_peer(FIRST), "idle")]
    assert len(shell.machine.sessions) == 0
    shell.submit("s")
    assert of(shell.assign("s"), OpenSession), "and opens again"


def test_a_runner_that_does_not_answer_in_time_has_lost_its_requests() -> None:
    shell = Shell().ready()
    shell.submit()
    shell.assign()
    assert shell.wait(4.9) == []
    effects = shell.wait(0.1)
    assert of(effects, Close)
    assert [failed.reason for failed in sent(effects, Failed)] == [FailReason.SESSION_LOST]


@pytest.mark.parametrize("how", ["closed", "lease"])
def test_a_lost_session_fails_the_epochs_that_run_there_and_no_others(how: str) -> None:
    shell = running("r", "s")
    shell.submit("t")
    shell.run("t", SECOND)
    gone = Closed(runner_peer(FIRST), "broke") if how == "closed" else Received(SCHEDULER, RunnerGone(FIRST))
    effects = shell.feed(gone)
    assert {failed.request_id for failed in sent(effects, Failed)} == {"r", "s"}
    assert shell.feed(gone) == [], "it is lost once"
    assert shell.machine.requests["t"].running
    assert (len(shell.machine.sessions), shell.machine.n_held) == (1, 2)
    assert of(shell.assign("r"), OpenSession), "also one that came back under its name"


@pytest.mark.parametrize("alive", [True, False])
def test_a_session_to_a_runner_without_a_lease_goes_on_where_it_answers(alive: bool) -> None:
    shell = running("r")
    peer, gone = runner_peer(FIRST), Received(SCHEDULER, RunnerGone(FIRST, unless_alive=True))
    assert shell.feed(gone) == [CheckSession(peer)]
    effects = shell.feed(SessionAlive(peer) if alive else Closed(peer, "no answer"))
    assert sent(effects, RunnerChecked) == [RunnerChecked(FIRST, alive)]
    assert [failed.request_id for failed in sent(effects, Failed)] == ([] if alive else ["r"])
    assert bool(shell.machine.requests["r"].running) is alive
    assert shell.feed(SessionAlive(peer)) == [], "nobody asks any more"


def test_a_runner_without_a_lease_is_not_alive_for_who_has_no_session() -> None:
    shell = running("r")
    gone = RunnerGone(SECOND, unless_alive=True)
    assert shell.feed(Received(SCHEDULER, gone)) == [Send(SCHEDULER, RunnerChecked(SECOND, alive=False))]
    shell.submit("s")
    shell.assign("s", SECOND)
    effects = shell.feed(Received(SCHEDULER, gone))
    assert sent(effects, Failed, RunnerChecked)[1:] == [RunnerChecked(SECOND, alive=False)], "it never had one"


def test_a_new_incarnation_ends_the_session_to_the_one_before() -> None:
    shell = running("r")
    shell.submit("s")
    effects = shell.assign("s", REBORN)
    assert of(effects, Close) == [Close(runner_peer(FIRST), "a new incarnation took its place")]
    assert [failed.request_id for failed in sent(effects, Failed)] == ["r"]
    assert [start.request_id for start in sent(effects, Start)] == ["s"]


@pytest.mark.parametrize(
    "lie",
    [
        Step(1, [SequenceTokens("r", Epoch(1, 1), 0, b"lie")]),
        Step(1, [SequenceTokens("r", Epoch(1, 1), 0, b"", FinishReason.EOS)]),
        NoCapacity("r", Epoch(1, 1), 0, "pages"),
        Ended("r", Epoch(1, 1), EndReason.INTERNAL),
    ],
    ids=["tokens", "an end", "no room", "given up"],
)
def test_a_runner_that_speaks_for_anothers_epoch_loses_its_session_and_changes_nothing(lie: object) -> None:
    shell = running("r")
    shell.submit("s")
    shell.run("s", SECOND)
    effects = shell.feed(Received(runner_peer(SECOND), lie))
    assert [type(one) for one in of(effects, PeerViolation, Close)] == [PeerViolation, Close]
    (failed,) = sent(effects, Failed)
    assert (failed.request_id, failed.reason) == ("s", FailReason.SESSION_LOST)
    assert "belongs to a different runner" in failed.detail
    assert shell.machine.requests["r"].running
    assert shell.step(b"ok")[-1] == Emit("r", "ok", (), 2)


def test_one_step_carries_the_tokens_of_many_and_touches_no_deadline() -> None:
    shell = running("r", "s")
    for name in ("r", "s"):
        shell.step(b"a", request_id=name)
    epochs = {name: shell.machine.requests[name].running.epoch for name in ("r", "s")}  # type: ignore[union-attr]
    tokens = [SequenceTokens(name, epoch, 1, b"b") for name, epoch in epochs.items()]
    assert shell.feed(Received(runner_peer(FIRST), Step(2, tokens))) == [Emit("r", "b", (), 2), Emit("s", "b", (), 2)]
    assert shell.machine.next_deadline() is None


def test_a_bug_that_one_request_hits_ends_this_request_alone() -> None:
    shell = running("r", "s")
    effects = shell.step(b"\xff")
    assert [type(one) for one in of(effects, RequestFailed, Finish)] == [RequestFailed, Finish]
    assert sent(effects, Stop, Cancel)
    assert shell.step(b"ok", request_id="s")[-1] == Emit("s", "ok", (), 2)


def test_an_answer_whose_outcome_cannot_be_encoded_ends_for_its_client_all_the_same() -> None:
    shell = Shell().ready()
    shell.machine._encode_outcome = lambda outcome: [][len(outcome.request_id)]  # type: ignore[assignment]
    shell.submit()
    shell.run()
    effects = shell.step(b"ab", FinishReason.EOS)
    assert [type(one) for one in of(effects, Finish, RequestFailed)] == [Finish, RequestFailed]
    assert effects[-1] == Send(SCHEDULER, Cancel("r")), "the scheduler frees it"
    assert shell.machine.admission.in_flight == 0


# ---------------------------------------------------------------- holds and routes


def test_only_requests_of_pools_whose_row_changed_are_examined_again() -> None:
    shell = Shell().ready()
    shell.submit("r", model=0)
    shell.submit("s", model=1)
    assert shell.machine.next_deadline() is None, "both queue in a pool that is available"
    empty = PoolRoute("team/base", "sha256:t", "tiny", 512, 0)
    assert RoutesChanged(True) in shell.feed(Received(SCHEDULER, Routes(2, False, 1, pools=(empty,))))
    assert [shell.machine.requests[name].hold_deadline for name in ("r", "s")] == [shell.now + 30.0, None]
    effects = shell.wait(30.0)
    (finish,) = of(effects, Finish)
    assert (finish.request_id, finish.end.failure and finish.end.failure.code) == ("r", "no_runner_available")


def test_a_gap_in_the_routes_is_asked_for_once() -> None:
    shell = Shell().ready()
    gap = Received(SCHEDULER, Routes(4, False, 3))
    assert shell.feed(gap, gap) == [Send(SCHEDULER, ResyncRoutes())]
    assert of(shell.feed(Received(SCHEDULER, replace(TABLE, version=4))), RoutesChanged) == [RoutesChanged(False)]
    assert shell.feed(gap) == [Send(SCHEDULER, ResyncRoutes())]


def test_a_first_table_in_parts_counts_once_it_is_whole() -> None:
    shell = Shell()
    shell.feed(Connected(SCHEDULER))
    shell.arrive("r")
    first, last = TABLE.parts(1)
    assert shell.feed(Received(SCHEDULER, first)) == [RoutesChanged(True)], "its tokenizers can be loaded"
    applied = Send(SCHEDULER, RoutesApplied(TABLE.version))
    assert shell.feed(Received(SCHEDULER, last)) == [RoutesChanged(True), Proceed("r"), applied]


def test_a_scheduler_that_is_away_is_named_when_the_hold_is_over() -> None:
    shell = Shell().ready()
    shell.submit()
    shell.feed(Closed(SCHEDULER))
    shell.submit("late")
    assert [one.request_id for one in sent(shell.feed(Connected(SCHEDULER)), Submit)] == ["r", "late"]
    assert shell.arrive("new") == [Proceed("new")], "the last routes count until newer ones come"
    shell.feed(ClientGone("new"))
    shell.feed(Closed(SCHEDULER))
    effects = shell.wait(30.0)
    finished = of(effects, Finish)
    codes = {one.request_id: one.end.failure and one.end.failure.code for one in finished}
    assert codes == {"r": "no_scheduler", "late": "no_scheduler"}
    (report, _) = sent(effects, OutcomeReport)
    assert (report.failed, report.ttft_ms, report.total_ms, finished[0].outcome.ttft_ms) == (True, 0, 30_000, 0)


# ---------------------------------------------------------------- outcomes


def test_an_outcome_has_the_wall_clock_of_its_arrival_and_its_durations() -> None:
    shell = running()
    shell.now += 1.5
    shell.step(b"a")
    shell.now += 2.0
    effects = shell.step(b"b", FinishReason.LENGTH)[-2:]
    (finish,), (report,) = of(effects, Finish), sent(effects, OutcomeReport)
    assert (report.ttft_ms, report.total_ms, report.failed) == (1500, 3500, False)
    outcome = finish.outcome
    assert (outcome.ttft_ms, outcome.total_ms, outcome.finished_unix_ms) == (1500, 3500, 8500)
    assert (outcome.completion_tokens, outcome.censored, outcome.predicted_p90_tokens) == (2, True, 21)


def test_an_outcome_is_reported_on_every_stream_until_it_is_acknowledged() -> None:
    shell = running()
    (report,) = sent(shell.step(b"ab", FinishReason.EOS), OutcomeReport)
    assert report.record.startswith(Outcome.__name__.encode())
    assert report.ttft_ms == 1, "none is an answer without a token"
    shell.feed(Closed(SCHEDULER))
    assert sent(shell.feed(Connected(SCHEDULER)), object) == [report, ResubmitComplete()]
    shell.feed(Received(SCHEDULER, OutcomeAck(("r", "unknown"))), Closed(SCHEDULER))
    assert sent(shell.feed(Connected(SCHEDULER)), object) == [ResubmitComplete()]


def test_beyond_the_bound_the_oldest_outcome_is_dropped() -> None:
    shell = Shell(replace(CONFIG, max_unacked=2)).ready()
    for name in ("r", "s", "t"):
        shell.submit(name)
    effects = shell.feed(ClientGone("r"), ClientGone("s"), ClientGone("t"))
    assert of(effects, OutcomeDropped) == [OutcomeDropped("r")]
    assert list(shell.machine.outcomes) == ["s", "t"]


def test_what_runs_is_submitted_again_with_its_place_and_its_age() -> None:
    shell = running()
    shell.step(b"abc")
    shell.feed(Closed(SCHEDULER))
    shell.now += 5.0
    submit, complete = sent(shell.feed(Connected(SCHEDULER)), object)
    assert (submit.runner, submit.epoch, submit.emitted_tokens, submit.waited_s) == (FIRST, Epoch(1, 1), 3, 5.0)
    assert complete == ResubmitComplete()
    shell.feed(Closed(runner_peer(FIRST)), Closed(SCHEDULER))
    held, _ = sent(shell.feed(Connected(SCHEDULER)), object)
    assert (held.runner, held.epoch, held.reservation_tokens, held.start_emitted_tokens) == (None, Epoch(), 0, 0)


def test_an_answer_that_fails_ends_the_others_of_its_request() -> None:
    shell = Shell().ready()
    shell.submit(n=2)
    shell.run("r/0")
    shell.feed(Received(SCHEDULER, Preempt("r/0", Epoch(1, 1))), Closed(SCHEDULER))
    effects = shell.wait(31.0)
    reasons = {one.request_id: one.end.reason for one in of(effects, Finish)}
    assert reasons == {"r/0": FinishReason.FAILED, "r/1": FinishReason.CANCELLED}
    assert shell.machine.admission.in_flight == 0


# ---------------------------------------------------------------- the end of the process


def test_a_drain_waits_for_answers_and_for_their_outcomes_to_be_stored() -> None:
    shell = running()
    assert shell.feed(DrainStarted(DRAIN_S)) == []
    assert shell.machine.admission.refusal(shell.now) is not None
    assert not of(shell.step(b"ab", FinishReason.EOS), Drained)
    assert shell.feed(Received(SCHEDULER, OutcomeAck(("r",)))) == [Drained()]
    assert shell.wait(100.0) == [Close(runner_peer(FIRST), "idle")], "drained once"


def test_a_drain_ends_by_name_what_takes_too_long_and_does_not_wait_for_an_absent_store() -> None:
    shell = running()
    shell.feed(DrainStarted(DRAIN_S))
    (finish,) = of(shell.wait(DRAIN_S), Finish)
    assert finish.end.failure.code == "shutting_down"
    assert of(shell.wait(1.0), Drained) == [Drained()]


@pytest.mark.parametrize("missing", ["routes", "tokenizer"])
def test_a_drain_refuses_what_is_held(missing: str) -> None:
    shell = Shell()
    if missing == "tokenizer":
        shell.feed(Connected(SCHEDULER), Received(SCHEDULER, TABLE))
    shell.arrive("r", 1 if missing == "tokenizer" else None)
    refusal, drained = shell.feed(DrainStarted(DRAIN_S))
    assert (refusal.failure.code, drained) == ("shutting_down", Drained())


@pytest.mark.parametrize(
    "broken",
    [
        lambda machine: machine.requests["r"].tokens.extend(range(101)),
        lambda machine: machine.sessions.get(runner_peer(FIRST)).requests.clear(),
        lambda machine: machine.admission.finished(Priority.BATCH, 0.0),
    ],
    ids=["stream", "sessions", "admission"],
)
def test_what_must_hold_is_looked_at(broken: Callable[[Gateway], object]) -> None:
    shell = running()
    broken(shell.machine)
    with pytest.raises(AssertionError):
        shell.machine.check()


# ---------------------------------------------------------------- under disturbance


def disturbed(seed: int) -> tuple[Shell, list[Effect]]:
    """A scheduler, runners, clients and a network that do what they may, by a seed; then everything settles."""
    chance, shell = random.Random(seed), Shell(replace(CONFIG, max_in_flight=20)).ready()
    runners, names = [FIRST, SECOND, REBORN], [f"r{index}" for index in range(6)]
    for name in names:
        shell.submit(name, n=chance.randint(1, 2))
    for _ in range(60):
        active = list(shell.machine.requests)
        one = chance.choice(active) if active else ""
        running = shell.machine.requests[one].running if active else None
        match chance.randrange(9):
            case 0 | 1 if active:
                shell.assign(one, chance.choice(runners))
            case 2:
                shell.feed(Connected(runner_peer(chance.choice(runners))))
            case 3:
                shell.feed(Closed(runner_peer(chance.choice(runners)), "broke"))
            case 4 if running:
                shell.step(b"ab", chance.choice([None, None, FinishReason.EOS]), one)
            case 5 if running:
                shell.step(b"lie", None, one, by=chance.choice(runners))
            case 6:
                shell.feed(Closed(SCHEDULER), Connected(SCHEDULER))
            case 7:
                shell.wait(chance.choice([0.01, 1.0, 20.0]))
            case _:
                shell.feed(ClientGone(chance.choice(names)))
    shell.feed(DrainStarted(DRAIN_S))
    shell.wait(20.0)
    return shell, shell.effects


@given(st.integers(0, 2**32))
def test_every_answer_ends_once_whatever_happens_and_equal_events_have_equal_effects(seed: int) -> None:
    shell, effects = disturbed(seed)
    finished = [effect.request_id for effect in of(effects, Finish)]
    submitted = {submit.request_id for submit in sent(effects, Submit)}
    assert sorted(finished) == sorted(submitted)
    assert (shell.machine.admission.in_flight, len(of(effects, Drained))) == (0, 1)
    assert disturbed(seed)[1] == effects

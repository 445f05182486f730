"""One request's machine: whatever is lost, repeated or late, the text is the undisturbed one, and it ends once."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.core.events import (
    Aborted,
    Assigned,
    Cancel,
    ClientGone,
    Effect,
    Emit,
    Epoch,
    EpochEnded,
    Event,
    Failed,
    FailedReason,
    Failure,
    Finish,
    FinishReason,
    HoldExpired,
    PoolAvailability,
    Preempted,
    Rejected,
    RunnerId,
    RunnerLost,
    Start,
    Started,
    StepTokens,
    Stop,
    TokenLogprob,
    TokenLogprobOut,
)
from weft_gateway.core.stream import Stream, check_stream

GONE = Failure("no_runner_available", "nobody")
FAULTS = [r for r in FailedReason if r not in {FailedReason.NO_ROOM, FailedReason.PREEMPTED}]
RUNNERS = [RunnerId("a", "1"), RunnerId("b", "1"), RunnerId("b", "2")]


def letter(token: int) -> bytes:
    """Tokens are bytes: some characters take several."""
    return bytes([token])


def stream(*, max_tokens: int = 100, stops: Sequence[str] = (), hold_s: float = 30.0, now: float = 0.0) -> Stream:
    return Stream(max_tokens=max_tokens, bytes_of=letter, stops=stops, hold_s=hold_s, now=now)


def assigned(counter: int, runner: RunnerId = RUNNERS[0], term: int = 1) -> Assigned:
    return Assigned(Epoch(term, counter), runner, f"{runner.uuid}:1", 8)


def step(
    counter: int, position: int, text: str | bytes, finish: FinishReason | None = None, term: int = 1
) -> StepTokens:
    tokens = text.encode() if isinstance(text, str) else text
    return StepTokens(Epoch(term, counter), position, list(tokens), finish)


def likely(positions: range) -> list[TokenLogprob]:
    """Log probabilities that name their position."""
    return [TokenLogprob(-float(position), ((position, -0.5),)) for position in positions]


def told_of(effects: Sequence[Effect]) -> list[TokenLogprobOut]:
    return [told for effect in effects if isinstance(effect, Emit) for told in effect.told]


def text_of(effects: Sequence[Effect]) -> str:
    return "".join(effect.text for effect in effects if isinstance(effect, Emit))


def run(one: Stream, *events: Event, now: float = 0.0) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects += one.handle(event, now)
        check_stream(one)
    return effects


def test_an_undisturbed_request_starts_streams_and_finishes() -> None:
    one = stream()
    effects = run(one, assigned(1), step(1, 0, "he"), step(1, 2, "y"), step(1, 3, "", FinishReason.EOS))
    assert effects == [
        Start(Epoch(1, 1), RUNNERS[0], "a:1", (), 8),
        Started(Epoch(1, 1)),
        Emit("he"),
        Emit("y"),
        Finish(FinishReason.EOS),
    ]
    assert (one.moves, len(one.tokens)) == (0, 3)


def test_a_move_stops_here_and_starts_there_at_once_with_the_tokens_so_far() -> None:
    one = stream()
    run(one, assigned(1), step(1, 0, "ab"))
    effects = run(one, assigned(2, RUNNERS[1]))
    assert effects == [Stop(Epoch(1, 1), RUNNERS[0]), Start(Epoch(1, 2), RUNNERS[1], "b:1", tuple(b"ab"), 8)]
    assert run(one, step(1, 2, "X"), step(2, 2, "c")) == [Started(Epoch(1, 2)), Emit("c")]
    assert one.moves == 1


def test_a_lower_epoch_never_takes_over_not_even_after_the_higher_one_broke() -> None:
    one = stream()
    run(one, assigned(1, term=2), RunnerLost(RUNNERS[0]))
    assert run(one, assigned(9, term=1), assigned(1, term=2)) == []
    assert isinstance(run(one, assigned(2, term=2))[0], Start)


@pytest.mark.parametrize(
    ("event", "reason", "stops"),
    [
        (Preempted(Epoch(1, 1)), FailedReason.PREEMPTED, True),
        (RunnerLost(RUNNERS[0], "broke"), FailedReason.SESSION_LOST, False),
        (EpochEnded(Epoch(1, 1), FailedReason.NO_ROOM, "pages", 3), FailedReason.NO_ROOM, False),
        (EpochEnded(Epoch(1, 1), FailedReason.DRAINED), FailedReason.DRAINED, False),
        (step(1, 7, "gap"), FailedReason.RUNNER_ERROR, True),
    ],
)
def test_what_ends_an_epoch_is_told_once_and_the_stream_is_held(
    event: Event, reason: FailedReason, stops: bool
) -> None:
    one = stream()
    run(one, assigned(1), step(1, 0, "abc"))
    effects = run(one, event)
    assert [type(effect) for effect in effects] == ([Stop] if stops else []) + [Failed]
    failed = effects[-1]
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.emitted_tokens, failed.epoch) == (reason, 3, Epoch(1, 1))
    assert one.hold_deadline == 30.0
    assert run(one, event, RunnerLost(RUNNERS[0]), Preempted(Epoch(1, 1))) == [], "a second trigger is ignored"


def test_a_break_of_another_runner_or_incarnation_is_no_news() -> None:
    one = stream()
    run(one, assigned(1, RUNNERS[1]))
    assert run(one, RunnerLost(RUNNERS[0]), RunnerLost(RUNNERS[2])) == []


def test_tokens_of_an_ended_epoch_are_dropped_while_the_stream_is_held() -> None:
    one = stream()
    run(one, assigned(1), step(1, 0, "a"), Preempted(Epoch(1, 1)))
    assert run(one, step(1, 1, "b")) == []
    assert one.tokens == list(b"a")


def test_repeated_tokens_are_dropped() -> None:
    one = stream()
    run(one, assigned(1), step(1, 0, "abc"))
    assert run(one, step(1, 0, "abc"), step(1, 2, "cd")) == []
    assert bytes(one.tokens) == b"abc"


def test_a_stop_string_ends_the_request_and_the_tokens_after_it_do_not_count() -> None:
    one = stream(stops=["END"])
    effects = run(one, assigned(1), step(1, 0, "well E"), step(1, 6, "NDmore"))
    assert text_of(effects) == "well "
    assert effects[-2:] == [Stop(Epoch(1, 1), RUNNERS[0]), Finish(FinishReason.STOP)]
    assert len(one.tokens) == len("well END")


def test_a_stop_string_in_the_runners_last_step_needs_no_stop() -> None:
    effects = run(stream(stops=["c"]), assigned(1), step(1, 0, "abc", FinishReason.EOS))
    assert effects[-2:] == [Emit("ab"), Finish(FinishReason.STOP)]
    assert not any(isinstance(effect, Stop) for effect in effects)


def test_held_back_text_is_released_at_the_end() -> None:
    effects = run(stream(stops=["END"]), assigned(1), step(1, 0, "the EN"), step(1, 6, "", FinishReason.EOS))
    assert text_of(effects) == "the EN"


def test_a_runner_that_overshoots_max_tokens_is_cut_and_stopped() -> None:
    one = stream(max_tokens=3)
    effects = run(one, assigned(1), step(1, 0, "abcdef"))
    assert text_of(effects) == "abc"
    assert Finish(FinishReason.LENGTH) in effects
    assert Stop(Epoch(1, 1), RUNNERS[0]) in effects


def test_a_client_that_goes_away_stops_the_runner_and_tells_the_scheduler() -> None:
    one = stream()
    run(one, assigned(1))
    assert run(one, ClientGone()) == [Stop(Epoch(1, 1), RUNNERS[0]), Cancel(), Finish(FinishReason.CANCELLED)]
    assert run(one, ClientGone(), assigned(2), step(1, 0, "a"), Aborted(GONE)) == []


def test_a_rejection_is_the_end_with_its_name() -> None:
    assert run(stream(), Rejected(GONE)) == [Finish(FinishReason.FAILED, GONE)]


def test_a_stream_is_held_for_the_hold_time_and_not_longer() -> None:
    one = stream(hold_s=30.0, now=100.0)
    assert one.handle(HoldExpired(GONE), 129.9) == []
    assert one.handle(HoldExpired(GONE), 130.0) == [Cancel(), Finish(FinishReason.FAILED, GONE)]


def test_the_hold_does_not_run_while_a_runner_has_the_request() -> None:
    one = stream(hold_s=30.0)
    one.handle(assigned(1), 10.0)
    assert one.hold_deadline is None
    assert one.handle(HoldExpired(GONE), 1000.0) == []


def test_assignments_that_come_to_nothing_do_not_prolong_the_hold() -> None:
    one = stream(hold_s=30.0)
    one.handle(assigned(1), 10.0)
    one.handle(EpochEnded(Epoch(1, 1), FailedReason.NO_ROOM), 11.0)
    assert one.hold_deadline == 31.0  # 10 s are used up
    one.handle(assigned(2), 21.0)
    one.handle(RunnerLost(RUNNERS[0]), 100.0)
    assert one.hold_deadline == 110.0  # 20 s are used up


def test_a_request_that_ran_may_be_held_for_the_full_time_again() -> None:
    one = stream(hold_s=30.0)
    one.handle(assigned(1), 29.0)
    one.handle(step(1, 0, "a"), 40.0)
    one.handle(RunnerLost(RUNNERS[0]), 50.0)
    assert one.hold_deadline == 80.0


QUEUED = [
    EpochEnded(Epoch(1, 1), FailedReason.NO_ROOM),
    EpochEnded(Epoch(1, 1), FailedReason.PREEMPTED),
    Preempted(Epoch(1, 1)),
]
BROKEN = [RunnerLost(RUNNERS[0]), *(EpochEnded(Epoch(1, 1), reason) for reason in FAULTS)]


@pytest.mark.parametrize("event", QUEUED)
def test_the_hold_of_a_stream_that_queues_counts_only_while_its_pool_is_not_served(event: Event) -> None:
    one = stream(hold_s=30.0)
    run(one, PoolAvailability(True), assigned(1), step(1, 0, "a"), event)
    assert one.hold_deadline is None
    assert run(one, HoldExpired(GONE), now=1000.0) == []
    run(one, PoolAvailability(False), now=1000.0)
    assert one.hold_deadline == 1030.0
    run(one, PoolAvailability(True), now=1010.0)
    assert one.hold_deadline is None
    run(one, PoolAvailability(False), now=2000.0)
    assert one.hold_deadline == 2020.0  # 10 s are used up


@pytest.mark.parametrize("event", BROKEN)
def test_the_hold_of_a_stream_that_lost_its_runner_runs_though_its_pool_is_said_to_be_served(event: Event) -> None:
    one = stream(hold_s=30.0)
    run(one, PoolAvailability(True), assigned(1), step(1, 0, "a"), event)
    assert one.hold_deadline == 30.0


def test_a_new_request_may_queue_as_long_as_its_pool_is_served() -> None:
    one = Stream(max_tokens=9, bytes_of=letter, hold_s=30.0, now=0.0, served=True)
    assert one.hold_deadline is None
    run(one, PoolAvailability(False), now=50.0)
    assert one.hold_deadline == 80.0


def test_a_preempted_stream_survives_a_queue_of_any_length() -> None:
    one = stream(hold_s=30.0)
    run(one, PoolAvailability(True))
    for counter in range(1, 20):
        now = counter * 100.0
        run(one, assigned(counter), step(counter, counter - 1, "a"), Preempted(Epoch(1, counter)), now=now)
        assert run(one, HoldExpired(GONE), now=now + 99.0) == []
    assert (one.finish, one.moves, one.counted_moves) == (None, 18, 0)


def test_only_what_the_system_did_not_do_itself_is_a_counted_move() -> None:
    one = stream()
    for counter, reason in enumerate(FailedReason, 1):
        run(one, assigned(counter), EpochEnded(Epoch(1, counter), reason))
    assert (one.moves, one.counted_moves) == (len(FailedReason) - 1, len(FAULTS))
    run(one, assigned(50), assigned(51))
    assert one.counted_moves == len(FAULTS) + 1, "moved without a Failed: the Assign had expired"


def test_an_epoch_knows_where_it_began() -> None:
    one = stream()
    run(one, assigned(1), step(1, 0, "abc"), Preempted(Epoch(1, 1)), assigned(2), step(2, 3, "de"))
    assert (one.start_tokens, len(one.tokens)) == (3, 5)


def test_doublings_add_up_over_epochs() -> None:
    one = stream()
    run(one, assigned(1), StepTokens(Epoch(1, 1), 0, [97], None, 2), assigned(2))
    run(one, StepTokens(Epoch(1, 2), 1, [98], None, 1))
    assert one.doublings == 3


def test_log_probabilities_that_were_not_asked_for_are_not_told() -> None:
    effects = run(stream(), assigned(1), StepTokens(Epoch(1, 1), 0, b"a", FinishReason.EOS, logprobs=likely(range(1))))
    assert Emit("a") in effects


@pytest.mark.parametrize("came", [0, 1, 3])
def test_a_runner_whose_log_probabilities_are_not_as_many_as_its_tokens_is_given_up(came: int) -> None:
    one = Stream(max_tokens=9, bytes_of=letter, logprobs=True, hold_s=30.0, now=0.0)
    effects = run(one, assigned(1), StepTokens(Epoch(1, 1), 0, b"ab", logprobs=likely(range(came))))
    assert [type(effect) for effect in effects] == [Start, Stop, Failed]
    assert isinstance(effects[-1], Failed)
    assert effects[-1].reason is FailedReason.RUNNER_ERROR
    assert one.tokens == [], "none of them counts"


# ---------------------------------------------------------------- the law, under disturbance


class Disturbed:
    """A scheduler, runners and a network that do what they may, by a seed: crash, move, repeat, reorder, lose."""

    def __init__(self, answer: bytes, stops: Sequence[str], max_tokens: int, seed: int) -> None:
        self.answer, self.random = answer[:max_tokens], random.Random(seed)
        self.ends = FinishReason.EOS if len(answer) < max_tokens else FinishReason.LENGTH
        self.one = Stream(max_tokens=max_tokens, bytes_of=letter, stops=stops, logprobs=True, hold_s=30.0, now=0.0)
        self.effects: list[Effect] = []
        self.past: list[Event] = []
        self.counter, self.term = 0, 1
        self.runs: dict[Epoch, int] = {}  # epoch -> the runner's next position

    def tell(self, event: Event) -> None:
        self.past.append(event)
        effects = self.one.handle(event, 0.0)
        check_stream(self.one)
        for effect in effects:
            if isinstance(effect, Start):
                self.runs[effect.epoch] = len(effect.emitted)
        self.effects += effects

    def assign(self) -> None:
        self.counter += 1
        if self.random.random() < 0.1:
            self.term, self.counter = self.term + 1, 1
        self.tell(assigned(self.counter, self.random.choice(RUNNERS), self.term))

    def generate(self, epoch: Epoch) -> None:
        """One iteration of the runner that has (or thinks it has) this epoch."""
        at = self.runs[epoch]
        tokens = list(self.answer[at : at + self.random.randint(0, 3)])
        self.runs[epoch] = at + len(tokens)
        ends = self.ends if at + len(tokens) == len(self.answer) else None
        self.tell(StepTokens(epoch, at, tokens, ends, logprobs=likely(range(at, at + len(tokens)))))

    def disturb(self) -> None:
        running = self.one.running
        match self.random.randrange(9):
            case 0:
                self.assign()
            case 1 if running:
                self.tell(Preempted(running.epoch))
            case 2:
                self.tell(RunnerLost(self.random.choice(RUNNERS)))
            case 3 if running:
                self.tell(EpochEnded(running.epoch, self.random.choice(list(FailedReason))))
            case 4 if self.past:
                self.tell(self.random.choice(self.past))  # late or repeated
            case 5 if self.runs:
                self.generate(self.random.choice(list(self.runs)))  # a runner that was told too late
            case 6 if running:
                self.runs[running.epoch] += 1  # a lost step: the next one leaves a gap
            case 7:
                self.tell(PoolAvailability(self.random.random() < 0.5))
            case _:
                self.tell(HoldExpired(GONE))

    def finish(self) -> None:
        for _ in range(4 * len(self.answer) + 20):
            if self.one.finish:
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
    assert told_of(rough.effects) == told_of(calm.effects)
    assert rough.one.tokens == calm.one.tokens
    assert rough.one.finish == calm.one.finish
    assert sum(isinstance(effect, Finish) for effect in rough.effects) == 1
    assert isinstance(rough.effects[-1], Finish), "nothing after the end"


@given(seed=st.integers(0, 2**32), end=st.sampled_from([ClientGone(), Rejected(GONE), Aborted(GONE)]))
def test_every_started_epoch_is_stopped_broken_or_finished_whatever_ends_the_request(seed: int, end: Event) -> None:
    world = Disturbed(b"a long enough answer", [], 100, seed)
    for _ in range(world.random.randint(0, 30)):
        world.disturb()
    world.tell(end)
    started = [e.epoch for e in world.effects if isinstance(e, Start)]
    ended = {e.epoch for e in world.effects if isinstance(e, Stop | Failed)}
    finished_by_runner = world.one.finish is not None and world.one.finish.reason is FinishReason.EOS
    assert set(started) - ended <= ({started[-1]} if finished_by_runner else set())
    failed = [e.epoch for e in world.effects if isinstance(e, Failed)]
    assert len(failed) == len(set(failed)), "an epoch fails once"
    assert sum(isinstance(effect, Finish) for effect in world.effects) == 1


def test_the_numerics_class_is_that_of_the_latest_tokens() -> None:
    one, seen = stream(), list[str]()
    for event in (
        replace(assigned(1), numerics_class="a"),
        step(1, 0, "x"),
        Preempted(Epoch(1, 1)),
        replace(assigned(2, RUNNERS[1]), numerics_class="b"),
        step(2, 1, "y"),
        replace(assigned(3), numerics_class="a"),
    ):
        one.handle(event, 0.0)
        seen.append(one.numerics_class)
    assert seen == ["", "a", "a", "a", "b", "b"]

"""An epoch on two runners: the KV of one is sent to the other, which computes the tokens after it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.gateway.test_stream import RUNNERS, after, assign, run, sent, step, stream, text_of
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import (
    Allotment,
    Assign,
    Ended,
    EndReason,
    Failed,
    FailReason,
    FinishReason,
    Freeze,
    Frozen,
    KvTarget,
    NoCapacity,
    Preempt,
    Start,
    Started,
    Stop,
    TokenRunner,
)
from weft_gateway.core.stream import RequestStream, SessionLost, StreamEffect, runner_peer

PROMPT, TOKEN = RUNNERS[0], RUNNERS[1]
E1, E2 = Epoch(1, 1), Epoch(1, 2)


def split(counter: int = 1) -> Assign:
    second = TokenRunner(TOKEN, "b:1", "b:kv", "class-b")
    return dataclasses.replace(assign(counter, PROMPT), token_runner=second, numerics_class="class-a")


def moving(counter: int, to: RunnerId) -> Assign:
    return dataclasses.replace(assign(counter, to), kv_address="kv")


def to(effects: Sequence[StreamEffect], runner: RunnerId, *kinds: type) -> list[Any]:
    return sent([effect for effect in effects if getattr(effect, "peer", None) == runner_peer(runner)], *kinds)


def placed(one: RequestStream) -> tuple[RunnerId | None, RunnerId | None, str]:
    """The runners, and the numerics class, that its Submit names to the scheduler."""
    submit = one.submit(0.0)
    return submit.runner, submit.token_runner, submit.numerics_class


def test_both_runners_start_at_once_and_each_names_the_other() -> None:
    one = stream(draft=(7, 8))
    effects = run(one, dataclasses.replace(split(), allotment=Allotment(by_page=True, leaves=True)), now=1.5)
    (token_side,) = to(effects, TOKEN, Start)
    (prompt_side,) = to(effects, PROMPT, Start)
    assert (token_side.kv_from, token_side.kv_to, token_side.reservation_tokens) == (PROMPT, None, 8)
    assert (prompt_side.kv_from, prompt_side.kv_to) == (None, KvTarget(TOKEN, "b:kv"))
    assert (token_side.draft, prompt_side.draft) == ((7, 8), ()), "the prompt's runner guesses nothing"
    assert prompt_side.reservation_tokens == 1, "it holds the prompt alone"
    assert [(side.allotment[3:5], side.waited_s) for side in (token_side, prompt_side)] == [
        ((True, True), 1.5), ((False, False), 1.5),
    ]  # fmt: skip
    assert [r.runner for r in one.runners] == [PROMPT, TOKEN]


@pytest.mark.parametrize("first", [PROMPT, TOKEN])
def test_the_text_is_whole_whichever_runner_sends_the_first_token_first(first: RunnerId) -> None:
    one = after(split())
    second = TOKEN if first == PROMPT else PROMPT
    effects = [effect for sender in (first, second) for effect in run(one, step(1, 0, "a"), runner=sender)]
    effects += run(one, step(1, 1, "b"), runner=TOKEN)
    assert text_of(effects) == "ab"
    assert Started("r", E1, handed_off=True) in sent(effects, Started)
    assert [r.runner for r in one.runners] == [TOKEN]
    assert placed(one) == (TOKEN, None, "class-b")


def test_before_the_hand_over_the_class_is_that_of_the_prompt_runner() -> None:
    one = after(split(), step(1, 0, "a"))
    assert placed(one) == (PROMPT, TOKEN, "class-a")


@pytest.mark.parametrize("lost", [PROMPT, TOKEN])
def test_either_runner_lost_before_the_hand_over_ends_the_epoch_on_both(lost: RunnerId) -> None:
    one = after(split(), step(1, 0, "a"))
    effects = run(one, SessionLost(lost))
    (failed,) = sent(effects, Failed)
    assert (failed.reason, failed.emitted_tokens, failed.runner) == (FailReason.SESSION_LOST, 1, lost)
    other = TOKEN if lost == PROMPT else PROMPT
    assert to(effects, other, Stop) == [Stop("r", E1)]
    assert not one.runners


def test_a_prompt_runner_lost_after_the_hand_over_changes_nothing() -> None:
    one = after(split(), step(1, 0, "a"))
    run(one, step(1, 0, "a"), runner=TOKEN)
    assert [one.speaks(runner) for runner in (PROMPT, TOKEN, RUNNERS[2])] == [True, True, False]
    assert run(one, Ended("r", E1, EndReason.DRAINED, "", 1), runner=PROMPT) == []
    assert run(one, SessionLost(PROMPT)) == []
    assert text_of(run(one, step(1, 1, "b"))) == "b"


def test_kv_that_was_lost_is_computed_again_under_the_next_epoch() -> None:
    one = after(split(), step(1, 0, "a"))
    effects = run(one, Ended("r", E1, EndReason.KV_LOST, "the stream broke", 1))
    (failed,) = sent(effects, Failed)
    assert (failed.reason, failed.detail) == (FailReason.KV_LOST, "the stream broke")
    assert sent(effects, Stop) == [Stop("r", E1)] * 2
    (start,) = sent(run(one, assign(2, RUNNERS[2])), Start)
    assert (start.emitted, start.kv_from, start.kv_to) == (tuple(b"a"), None, None)


def test_a_token_runner_without_capacity_stops_the_prompt_runner() -> None:
    one = after(split())
    effects = run(one, NoCapacity("r", E1, 0, "pages"))
    assert to(effects, PROMPT, Stop) == [Stop("r", E1)]


def test_an_answer_of_one_token_ends_on_both_runners() -> None:
    one = after(split())
    effects = run(one, step(1, 0, "a", FinishReason.EOS))
    assert one.end
    assert to(effects, TOKEN, Stop) == [Stop("r", E1)]


def test_a_migration_with_kv_freezes_first_and_starts_on_the_runner_that_receives_it() -> None:
    one = after(assign(1, PROMPT), step(1, 0, "ab"))
    effects = run(one, moving(2, TOKEN))
    assert (one.migrations, one.counted_migrations) == (1, 0)
    assert sent(effects, Freeze, Start, Stop) == [Freeze("r", E1, E2, KvTarget(TOKEN, "kv"))]
    assert text_of(run(one, step(1, 2, "c"))) == "c", "the epoch before speaks until it is frozen"
    (start,) = to(run(one, Frozen("r", E1, 3)), TOKEN, Start)
    assert (start.epoch, start.emitted, start.kv_from) == (E2, tuple(b"abc"), PROMPT)
    assert run(one, step(1, 3, "x")) == [], "and not after it"
    effects = run(one, step(2, 3, "d"), runner=TOKEN)
    assert text_of(effects) == "d"
    assert [r.runner for r in one.runners] == [TOKEN]


def frozen_stream() -> RequestStream:
    return after(assign(1, PROMPT), step(1, 0, "ab"), moving(2, TOKEN))


@pytest.mark.parametrize(
    "event", [SessionLost(PROMPT), Ended("r", E1, EndReason.DRAINED, "", 2), Frozen("r", E1, 5), step(1, 3, "z")]
)
def test_a_runner_that_does_not_freeze_leaves_a_migration_without_kv(event: object) -> None:
    one = frozen_stream()
    (start,) = to(run(one, event), TOKEN, Start)  # type: ignore[arg-type]
    assert (start.epoch, start.emitted, start.kv_from) == (E2, tuple(b"ab"), None)
    assert sent(run(one, step(2, 2, "c")), Started) == [Started("r", E2)]


def test_a_newer_assignment_while_a_runner_freezes_migrates_without_kv() -> None:
    one = frozen_stream()
    effects = run(one, moving(3, RUNNERS[2]))
    (start,) = to(effects, RUNNERS[2], Start)
    assert start.kv_from is None
    assert to(effects, PROMPT, Stop) == [Stop("r", E2)]
    assert run(one, Frozen("r", E1, 2)) == []


def test_a_preemption_while_a_runner_freezes_stops_it() -> None:
    one = frozen_stream()
    effects = run(one, Preempt("r", E2))
    assert to(effects, PROMPT, Stop) == [Stop("r", E2, preempted=True)]
    (failed,) = sent(effects, Failed)
    assert failed.epoch == E2

"""Whose prompt is worked on, for any trace; and when a batch may run again without being chosen anew."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.core.batch import BatchLimits, Candidate
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.step_time_model import GUESS, StepModel

ARRIVALS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 200)), min_size=1, max_size=25)
LIMITS = st.builds(
    BatchLimits,
    max_prefills=st.integers(1, 3),
    max_batch_tokens=st.integers(40, 128),
    token_time_ms=st.sampled_from([5.0, 12.0, 1000.0]),
    prefill_age=st.integers(0, 5),
)


class Desk:
    """Prompts that arrive, get their chunks, and leave when they are through. `decoding` rows run beside them."""

    def __init__(self, limits: BatchLimits, decoding: int = 0) -> None:
        self.limits, self.chooser = limits, BatchScheduler(limits, GUESS)
        self.left: dict[str, int] = {}
        self.decoding = [Candidate(f"d{i}", "", 1) for i in range(decoding)]
        self.served: list[list[tuple[str, int]]] = []

    def arrive(self, key: str, tokens: int) -> None:
        self.chooser.changed()
        self.left[key] = tokens

    def step(self) -> list[tuple[str, int]]:
        waiting = [Candidate(key, "", tokens) for key, tokens in self.left.items()]
        batch = self.chooser.schedule(waiting, self.decoding, 0, lambda: 1)
        self.chooser.ran(batch)
        rows = [(row.key, row.n_tokens) for row in batch.rows[: batch.n_prefills]]
        for key, tokens in rows:
            self.left[key] -= tokens
            if not self.left[key]:
                del self.left[key]
        self.served.append(rows)
        return rows


def play(limits: BatchLimits, arrivals: list[tuple[int, int]], decoding: int = 0) -> tuple[Desk, list[list[str]]]:
    """Every prompt after its pause in iterations, until all are through; and who waited, in order, each time."""
    desk, waited = Desk(limits, decoding), list[list[str]]()
    coming = [(pause, f"p{i}", tokens) for i, (pause, tokens) in enumerate(arrivals)]
    while coming or desk.left:
        while coming and (coming[0][0] <= 0 or not desk.left):
            _, key, tokens = coming.pop(0)
            desk.arrive(key, tokens)
        coming = [(pause - (i == 0), key, tokens) for i, (pause, key, tokens) in enumerate(coming)]
        waited.append(list(desk.left))
        desk.step()
        assert len(waited) < 10_000, "somebody starves"
    return desk, waited


@given(LIMITS, ARRIVALS, st.integers(0, 8))
def test_the_eldest_is_never_passed_more_often_in_a_row_than_its_age(limits, arrivals, decoding):
    desk, waited = play(limits, arrivals, decoding)
    passed, last = 0, ""
    for order, rows in zip(waited, desk.served, strict=True):
        eldest = order[0]
        passed = 0 if eldest in dict(rows) else (passed if eldest == last else 0) + 1
        last = eldest
        assert passed <= limits.prefill_age, (eldest, passed)


@given(LIMITS, ARRIVALS, st.integers(0, 8))
def test_every_prompt_is_through_within_its_bound_and_gets_exactly_its_tokens(limits, arrivals, decoding):
    """(age + 1) x (the chunks of those before it and its own), of at least 32 tokens or what the batch has room for."""
    desk, waited = play(limits, arrivals, decoding)
    sizes = {f"p{i}": tokens for i, (_, tokens) in enumerate(arrivals)}
    got = dict.fromkeys(sizes, 0)
    for rows in desk.served:
        for key, tokens in rows:
            got[key] += tokens
    assert got == sizes
    chunk = min(32, limits.max_batch_tokens - decoding)
    for key, size in sizes.items():
        here = [n for n, order in enumerate(waited) if key in order]
        before = waited[here[0]][: waited[here[0]].index(key)]
        chunks = sum(-(-sizes[k] // chunk) for k in before) + -(-size // chunk)
        assert len(here) <= (limits.prefill_age + 1) * chunks


@given(LIMITS, ARRIVALS, st.integers(0, 8))
def test_each_iteration_serves_the_eldest_when_it_is_due_and_else_the_least_work_in_order_of_admission(
    limits, arrivals, decoding
):
    desk = Desk(limits, decoding)
    for i, (_, tokens) in enumerate(arrivals):
        desk.arrive(f"p{i}", tokens)
    while desk.left:
        left = dict(desk.left)
        order = list(left) if not limits.prefill_age else sorted(left, key=lambda key: left[key])
        got = [key for key, _ in desk.step()]
        if got != order[: len(got)]:
            assert got[0] == next(iter(left)), "only the eldest goes before those with less left"
            assert got[1:] == [key for key in order if key != got[0]][: len(got) - 1]


def test_a_short_prompt_passes_a_long_one_that_has_begun_and_the_long_one_goes_on():
    desk = Desk(BatchLimits(1, 64))
    desk.arrive("long", 200)
    assert desk.step() == [("long", 64)]
    desk.arrive("short", 10)
    assert [desk.step() for _ in range(4)] == [[("short", 10)], [("long", 64)], [("long", 64)], [("long", 8)]]


def test_under_a_stream_of_short_prompts_a_long_one_gets_every_third_iteration():
    desk = Desk(BatchLimits(1, 64, prefill_age=2))
    desk.arrive("long", 300)
    for i in range(12):
        desk.arrive(f"s{i}", 10)
        desk.step()
    assert [rows[0][0] == "long" for rows in desk.served] == [False, False, True] * 4


def test_at_age_0_it_is_first_come_first_served():
    desk = Desk(BatchLimits(1, 64, prefill_age=0))
    for key, tokens in (("a", 100), ("b", 5), ("c", 70)):
        desk.arrive(key, tokens)
    assert [desk.step()[0][0] for _ in range(5)] == ["a", "a", "b", "c", "c"]


def test_shortest_first_waits_less_on_average_than_first_come_first_served():
    """Why prompts may pass: the same traces, served both ways."""
    drawn = random.Random(7)

    def mean_wait(age: int) -> float:
        drawn.seed(7)
        arrivals = [(drawn.randint(0, 2), drawn.choice((8, 16, 32, 640))) for _ in range(60)]
        _, waited = play(BatchLimits(1, 64, prefill_age=age), arrivals)
        return sum(len(order) for order in waited) / 60

    assert mean_wait(8) < 0.6 * mean_wait(0)


# ---- the batch that stands


def decoding(n: int) -> list[Candidate]:
    return [Candidate(f"d{i}", "", 1) for i in range(n)]


def test_a_batch_stands_until_a_row_needs_a_page():
    chooser = BatchScheduler(BatchLimits(), GUESS)
    batch = chooser.schedule([], decoding(3), 100, lambda: 3)
    for _ in range(2):
        assert chooser.standing is batch
        chooser.ran(batch)
    assert chooser.standing is batch, "the last of its three iterations"
    chooser.ran(batch)
    assert chooser.standing is None


def test_a_batch_with_a_prompt_or_one_that_changed_does_not_stand():
    chooser = BatchScheduler(BatchLimits(), GUESS)
    chooser.schedule([Candidate("p", "", 5)], decoding(3), 100, lambda: 3)
    assert chooser.standing is None
    batch = chooser.schedule([], decoding(3), 100, lambda: 3)
    chooser.changed()
    chooser.ran(batch)
    assert chooser.standing is None
    chooser.schedule([], decoding(3), 100, lambda: 0)
    assert chooser.standing is None, "somebody is paused: pages may become free at any time"


def test_keys_grow_with_a_batch_that_stands_so_that_its_times_are_compared_with_the_right_ones():
    chooser = BatchScheduler(BatchLimits(), StepModel(0.0, 0.0, 0.01, 1.0))
    batch = chooser.schedule([], decoding(10), 1000, lambda: 100)
    for step in range(50):
        chooser.ran(batch)
        chooser.timed(batch, 0.01 * (1000 + 10 * (step + 1)))
    assert chooser.step_time.decode == pytest.approx(1.0), "each took as long as the model says for its keys"

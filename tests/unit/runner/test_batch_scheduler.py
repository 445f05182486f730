"""The prompt that is computed, for any trace; and when a batch may run again without being chosen anew."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.request import Priority
from weft_runner.core import Batching, BatchLimits, StepModel
from weft_runner.core.batch import Candidate
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.step_time_model import GUESS, LATE_STEPS, Lateness

ARRIVALS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 200)), min_size=1, max_size=25)
LIMITS = st.builds(
    BatchLimits,
    max_prefills=st.integers(1, 3),
    max_batch_tokens=st.integers(40, 128),
    token_time_ms=st.sampled_from([5.0, 12.0, 1000.0]),
)


class Desk:
    """Prompts that arrive, get their chunks, and leave when they are through. `decoding` rows run beside them."""

    def __init__(self, limits: BatchLimits, decoding: int = 0) -> None:
        self.limits, self.chooser = limits, BatchScheduler(limits, GUESS)
        self.left: dict[str, int] = {}
        self.decoding = [Candidate(f"d{i}", "", 1) for i in range(decoding)]
        self.served: list[list[tuple[str, int]]] = []

    def arrive(self, key: str, tokens: int) -> None:
        self.chooser.invalidate()
        self.left[key] = tokens

    def step(self) -> list[tuple[str, int]]:
        waiting = [Candidate(key, "", tokens) for key, tokens in self.left.items()]
        batch = self.chooser.schedule(waiting, self.decoding, 0, lambda: 1)
        self.chooser.count_run(batch)
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
def test_no_later_prompt_runs_more_iterations_than_an_earlier_one_and_each_gets_exactly_its_tokens(
    limits, arrivals, decoding
):
    """ORCA, section 4.2; and each is through after the chunks of those before it and its own."""
    desk, waited = play(limits, arrivals, decoding)
    got = dict.fromkeys((f"p{i}" for i in range(len(arrivals))), 0)
    for order, rows in zip(waited, desk.served, strict=True):
        assert [key for key, _ in rows] == order[: len(rows)]
        for key, tokens in rows:
            got[key] += tokens
    assert got == {f"p{i}": tokens for i, (_, tokens) in enumerate(arrivals)}
    chunk = min(32, limits.max_batch_tokens - decoding)
    for key, size in got.items():
        here = [n for n, order in enumerate(waited) if key in order]
        before = waited[here[0]][: waited[here[0]].index(key)]
        assert len(here) <= sum(-(-got[k] // chunk) for k in before) + -(-size // chunk)


# ---- the batch that stands


def decoding(n: int) -> list[Candidate]:
    return [Candidate(f"d{i}", "", 1) for i in range(n)]


def test_a_batch_stands_until_a_row_needs_a_page():
    chooser = BatchScheduler(BatchLimits(), GUESS)
    batch = chooser.schedule([], decoding(3), 100, lambda: 3)
    for _ in range(2):
        assert chooser.reusable_batch is batch
        chooser.count_run(batch)
    assert chooser.reusable_batch is batch, "the last of its three iterations"
    chooser.count_run(batch)
    assert chooser.reusable_batch is None


def test_a_batch_with_a_prompt_or_one_that_changed_does_not_stand():
    chooser = BatchScheduler(BatchLimits(), GUESS)
    chooser.schedule([Candidate("p", "", 5)], decoding(3), 100, lambda: 3)
    assert chooser.reusable_batch is None
    batch = chooser.schedule([], decoding(3), 100, lambda: 3)
    chooser.invalidate()
    chooser.count_run(batch)
    assert chooser.reusable_batch is None
    chooser.schedule([], decoding(3), 100, lambda: 0)
    assert chooser.reusable_batch is None, "somebody is paused: pages may become free at any time"


def test_keys_grow_with_a_batch_that_stands_so_that_its_times_are_compared_with_the_right_ones():
    chooser = BatchScheduler(BatchLimits(), StepModel(0.0, 0.0, 0.01, 1.0))
    batch = chooser.schedule([], decoding(10), 1000, lambda: 100)
    for step in range(50):
        chooser.count_run(batch)
        chooser.learn(batch, 0.01 * (1000 + 10 * (step + 1)))
    assert chooser.step_time.decode == pytest.approx(1.0), "each took as long as the model says for its keys"


# ---- the batching mechanisms that Splitwise compares (section 2.5)


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (Batching.MIXED, [("p", "d0", "d1"), ("q", "d0", "d1"), ("d0", "d1")]),
        (Batching.CONTINUOUS, [("p",), ("q",), ("d0", "d1")]),
    ],
)
def test_prompts_run_beside_running_rows_or_alone_and_first(batching, expected):
    chooser = BatchScheduler(BatchLimits(batching=batching), GUESS)
    prompts = [Candidate("p", "", 5), Candidate("q", "", 5)]
    seen = [tuple(r.key for r in chooser.schedule(prompts[at:], decoding(2), 9, lambda: 2).rows) for at in range(3)]
    assert seen == expected
    assert chooser.keys == 9


def test_request_level_batching_begins_no_request_before_the_last_of_the_batch_is_over():
    chooser = BatchScheduler(BatchLimits(max_prefills=2, batching=Batching.REQUEST), GUESS)

    def rows(prompts: str, running: str) -> str:
        waiting = [Candidate(key, "", 5) for key in prompts]
        batch = chooser.schedule(waiting, [Candidate(key, "", 1) for key in running], 0, lambda: 2)
        return "".join(row.key for row in batch.rows)

    assert rows("ab", "") == "ab"
    assert rows("cd", "ab") == "ab", "whoever comes later waits"
    assert rows("cd", "b") == "b"
    assert rows("cd", "") == "cd"


# ---- batch requests beside interactive ones

MODELS = st.builds(
    StepModel, base_ms=st.floats(0.5, 20.0), row_ms=st.floats(0.0, 2.0), key_ms=st.floats(0.0, 0.01),
    token_ms=st.floats(0.001, 2.0),
)  # fmt: skip


def rows_of(kind: str, priority: Priority, keys: list[int], pending: int = 1) -> list[Candidate]:
    return [Candidate(f"{kind}{i}", "", pending, keys=count, priority=priority) for i, count in enumerate(keys)]


KEYS = st.lists(st.integers(1, 2000), max_size=10)
PENDING = st.integers(1, 300)


@given(MODELS, KEYS, KEYS, PENDING, st.booleans(), st.booleans(), st.sampled_from([5.0, 20.0, 60.0, float("inf")]))
def test_no_step_with_interactive_rows_passes_the_token_time_because_of_batch_rows(
    model, interactive, batch, pending, prompt, batch_prompt, token_time_ms
):
    chooser = BatchScheduler(BatchLimits(max_prefills=2, max_batch_tokens=64, token_time_ms=token_time_ms), model)
    rows = rows_of("i", Priority.INTERACTIVE, interactive)
    prompts = rows_of("ip", Priority.INTERACTIVE, [0] * prompt, pending)
    lines, line_prompts = rows_of("b", Priority.BATCH, batch), rows_of("bp", Priority.BATCH, [0] * batch_prompt, 40)
    keys = sum(row.keys for row in (*rows, *lines))
    found = chooser.schedule([*prompts, *line_prompts], [*rows, *lines], keys, lambda: 9)
    of = {row.key: row for row in found.rows}
    assert found.n_tokens <= 64
    if not rows and not prompts:
        assert {*of} >= {row.key for row in lines}, "nobody waits for a token: no bound"
        return
    before = BatchScheduler(BatchLimits(max_prefills=2, max_batch_tokens=64, token_time_ms=token_time_ms), model)
    alone = before.schedule(prompts, rows, sum(row.keys for row in rows), lambda: 0)
    assert {row.key: row for row in alone.rows} == {key: row for key, row in of.items() if key.startswith("i")}
    with_batch = [key for key in of if key.startswith("b")]
    decoded = [row for row in (*rows, *lines) if row.key in of]
    expected = chooser.step_time.step_ms(len(decoded), sum(row.keys for row in decoded), found.prompt_tokens)
    assert not with_batch or expected <= chooser.token_time_ms * (1 + 1e-9)
    assert chooser.keys == sum(row.keys for row in decoded)
    assert chooser.reusable_batch is None or not (lines or line_prompts), "what fits is found anew for each step"


@given(st.integers(1, 12), st.integers(0, 8))
def test_batch_rows_that_do_not_all_fit_take_turns(batch, fitting):
    """Rows of equal cost: after any number of steps no one has run more than one step more than another."""
    chooser = BatchScheduler(BatchLimits(token_time_ms=11.0 + fitting), StepModel(10.0, 1.0, 0.0, 0.1))
    rows, lines = decoding(1), rows_of("b", Priority.BATCH, [5] * batch)
    ran = Counter(dict.fromkeys((line.key for line in lines), 0))
    for _ in range(3 * batch):
        found = chooser.schedule([], [*rows, *lines], 0, lambda: 9)
        ran.update(row.key for row in found.rows if row.key in ran)
    assert sum(ran.values()) == 3 * batch * min(batch, fitting)
    assert max(ran.values()) - min(ran.values()) <= 1
    assert chooser.held_rows == 3 * batch * (batch - min(batch, fitting))


def test_without_an_objective_batch_rows_join_up_to_twice_a_step_of_one_row_and_prompts_keep_their_time():
    """A pool without `slo`: the time that prompts are chunked to is not the one that lines keep."""
    chooser = BatchScheduler(BatchLimits(max_prefills=1, chunk_time_ms=100.0), StepModel(9.0, 1.0, 0.0, 1.0))
    found = chooser.schedule([], [*decoding(1), *rows_of("b", Priority.BATCH, [5] * 60)], 0, lambda: 9)
    assert len(found.rows) == 11, "20 ms"
    found = chooser.schedule([Candidate("p", "", 500)], decoding(1), 0, lambda: 9)
    assert found.prompt_tokens == 80, "of 90, in tiles"


def test_a_batch_prompt_comes_after_an_interactive_one_and_before_batch_rows_that_all_fit():
    chooser = BatchScheduler(BatchLimits(max_prefills=2, token_time_ms=40.0), StepModel(10.0, 1.0, 0.0, 1.0))
    line = Candidate("bp", "", 100, priority=Priority.BATCH)
    rows, lines = decoding(1), rows_of("b", Priority.BATCH, [5] * 3)

    def tokens(prompts: list[Candidate]) -> dict[str, int]:
        found = chooser.schedule(prompts, [*rows, *lines], 0, lambda: 9)
        return {row.key: row.n_tokens for row in found.rows}

    assert tokens([line]) == {"bp": 16, "d0": 1, "b0": 1, "b1": 1, "b2": 1}
    assert tokens([Candidate("p", "", 5), line]) == {"p": 5, "bp": 16, "d0": 1, "b0": 1, "b1": 1, "b2": 1}
    assert tokens([Candidate("p", "", 500), line]) == {"p": 32, "d0": 1}
    lines = rows_of("b", Priority.BATCH, [5] * 40)
    assert len(tokens([line])) == 30, "one row more would gain nothing while these do not all fit"


@pytest.mark.parametrize("disturbance_ms", [2.0, 6.0])
def test_the_share_of_late_steps_is_kept_below_one_in_a_hundred(disturbance_ms):
    """What else runs on the machine takes its time from one step in twenty; the lines leave that time free."""
    chooser = BatchScheduler(BatchLimits(token_time_ms=20.0), StepModel(10.0, 0.5, 0.0, 1.0))
    rows, lines = decoding(2), rows_of("b", Priority.BATCH, [5] * 20)
    chance, late, joined = random.Random(1), 0, 0
    for step in range(2000):
        found = chooser.schedule([], [*rows, *lines], 0, lambda: 9)
        measured_ms = 10.0 + 0.5 * len(found.rows) + (disturbance_ms if chance.random() < 0.05 else 0.0)
        chooser.learn(found, measured_ms, 0)
        late += step >= 1000 and measured_ms > 20.0
        joined += len(found.rows) - 2
    assert late < 0.01 * 1000
    room = 2 * (10.0 - disturbance_ms) - 2
    assert 0.6 * room < joined / 2000 < 1.2 * room, "that time, and no more"


def test_steps_that_no_interactive_row_waited_for_hold_no_line():
    chooser = BatchScheduler(BatchLimits(token_time_ms=20.0), StepModel(10.0, 0.5, 0.0, 1.0))
    lines = rows_of("b", Priority.BATCH, [5] * 4)
    for _ in range(LATE_STEPS):
        chooser.learn(chooser.schedule([], lines, 20, lambda: 9), 30.0, 0, awaited=False)
    assert chooser.lateness.ms(20.0) == 0.0


def test_a_disturbance_is_forgotten_and_a_step_that_nobody_expected_in_time_does_not_count():
    lateness = Lateness()
    for late_ms in (*[9.0] * 20, *[0.5] * (LATE_STEPS - 1), -1.0):
        lateness.add((10.0, 10.0 + late_ms))
    assert lateness.ms(20.0) == 0.5
    for _ in range(20):
        lateness.add((30.0, 90.0))
    assert lateness.ms(20.0) == 0.5

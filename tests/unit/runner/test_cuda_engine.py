"""The engine on the cuda executor, under Triton's interpreter: adapters in KV pages, recorded steps, steps in flight.

What it says is compared with the engine on the reference executor, token for token, on the same small model in fp32:
of one layer, unless what a test looks at may differ between layers (every layer's logits: `tests/oracle/test_cuda.py`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import GridExecutor

from harness import interpreter
from harness.numerics import near
from weft.domain.model.spec import ModelSpec
from weft.domain.request import FinishReason, PooledState, PromptLogprobs, Sampling, Stop
from weft_runner.core import BatchLimits, PoolLimits
from weft_runner.core.request_pool import check_pool
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.weights import load_weights

GREEDY = Sampling(ignore_eos=True)
P = 16


class Watched(CudaExecutor):
    """Counts the steps that were launched behind another, and can fail one of them."""

    followed = 0
    fail_next = False

    def run(self, step: Any, **how: Any) -> Any:
        if step.taken:
            self._count()
        return super().run(step, **how)

    def follow(self, step: Any) -> Any:
        self._count()
        return super().follow(step)

    def _count(self) -> None:
        self.followed += 1
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("a device's own trouble")


def interpreted(files: dict[str, Path], spec: ModelSpec, limits: PoolLimits) -> Watched:
    sizes = Sizes(
        limits.total_pages, P, slots=limits.max_adapters, max_rank=16, rows=4, context=limits.max_context_tokens,
        graphs=True,
    )  # fmt: skip
    return Watched(spec, load_weights(files, spec), sizes)


@pytest.fixture(autouse=True)
def no_empty_grids(monkeypatch) -> None:
    """A GPU refuses to launch a kernel of no programs; the interpreter does not mind."""
    interpreter.hurry()
    call = GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert callable(self.grid) or all(self.grid), (self.fn, self.grid)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", checked)


@pytest.fixture
def pair_of(new_world, small_config, tmp_path, make_driver) -> Any:
    """(cuda, reference): drivers over one model with adapters a, b and c."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}

    def make(*, layers: int = 1, **limits: Any) -> tuple[Any, Any]:
        world = new_world(tmp_path / str(layers), {**small_config, **heads, "num_hidden_layers": layers})
        if not world.root.exists():
            world.write_base()
            for seed, name in enumerate("abc"):
                world.write_adapter(name, seed=seed, rank=(3, 8, 16)[seed])
        given = {"page_tokens": P, "total_pages": 96, "max_adapters": 2, **limits}
        executor = make_driver(world, make_executor=interpreted, **given).engine.executor
        page_bytes = executor.page_bytes
        cuda = make_driver(world, make_executor=lambda *_: executor, page_bytes=page_bytes, **given)
        return cuda, make_driver(world, **given)

    return make


def both(pair: tuple[Any, Any], *requests: tuple[str, list[int], int, str, Sampling]) -> None:
    for driver in pair:
        for key, prompt, n_tokens, adapter, sampling in requests:
            driver.post(driver.request(key, prompt, n_tokens, adapter, sampling=sampling))


def same(pair: tuple[Any, Any], *keys: str) -> None:
    """Let both finish; these answers are the same."""
    for driver in pair:
        driver.finish()
        check_pool(driver.pool)
    cuda, reference = pair
    assert {key: cuda.answer(key) for key in keys} == {key: reference.answer(key) for key in keys}


def events(pair: tuple[Any, Any], kind: type[Any]) -> list[list[Any]]:
    return [[event for event in driver.events if isinstance(event, kind)] for driver in pair]


def test_answers_are_the_references_and_most_steps_are_launched_ahead(pair_of):
    """Base, two adapters, one that ends early, and a draw: all in one batch."""
    pair = pair_of()
    both(
        pair,
        ("base", [5, 9, 4], 5, "", GREEDY),
        ("a", [7] * 20, 5, "a", GREEDY),
        ("b", [3, 1], 3, "b", GREEDY),
        ("drawn", [11, 12, 13], 5, "a", Sampling(temperature=0.9, top_p=0.8, seed=7, ignore_eos=True)),
    )
    same(pair, "base", "a", "b", "drawn")
    assert pair[0].engine.executor.followed >= 4


@pytest.mark.slow
def test_an_adapter_that_left_comes_back_into_other_pages(pair_of):
    """Two slots, three adapters, and pages that tokens had meanwhile."""
    pair = pair_of(layers=2)
    for turn, adapter in enumerate("abca"):
        both(pair, (f"{turn}", [turn + 3] * 5, 2, adapter, GREEDY), (f"{turn} base", [turn + 4] * 40, 2, "", GREEDY))
        same(pair, f"{turn}", f"{turn} base")


def test_a_sequence_that_leaves_during_a_step_has_no_further_output_and_the_others_continue(pair_of):
    pair = pair_of()
    for driver in pair:
        driver.post(driver.request("stays", [5, 9, 4], 7, "b", sampling=GREEDY))
        driver.post(leaving := driver.request("leaves", [8, 8], 9, "a", sampling=GREEDY))
        while len(driver.answer("leaves")) < 3:
            driver.beat()
        driver.post(Stop("leaves", leaving.epoch))
        driver.post(driver.request("comes", [6, 2], 3, "a", sampling=GREEDY))
    same(pair, "stays", "comes")
    assert pair[0].engine.executor.followed
    assert len(pair[0].answer("leaves")) == 3


@pytest.mark.slow
def test_a_sequence_that_was_in_host_memory_continues_as_the_references(pair_of):
    """Three pages for two sequences of two pages each."""
    pair = pair_of(total_pages=3, swap_page_bytes=1)
    for driver in pair:
        for key, prompt in (("old", [5, 9] * 7), ("new", [7, 8] * 7)):
            driver.post(driver.request(key, prompt, 12, reservation_tokens=1, sampling=GREEDY))
    same(pair, "old", "new")
    assert all(driver.pool.swap.in_bytes == driver.pool.swap.out_bytes > 0 for driver in pair)


@pytest.mark.slow
def test_a_prompt_in_chunks_beside_decode_is_the_references(pair_of):
    """A chunk that is not the last has no token: nothing is sampled in its step when it is alone."""
    pair = pair_of(batch=BatchLimits(max_batch_tokens=9))
    both(pair, ("alone", [3, 4] * 12, 2, "a", GREEDY))
    same(pair, "alone")
    both(pair, ("x", [5, 9, 4], 6, "a", GREEDY), ("y", [7, 8] * 10, 3, "b", GREEDY))
    same(pair, "x", "y")


@pytest.mark.numeric
@pytest.mark.slow
def test_penalties_masks_and_log_probabilities_are_the_references_and_no_step_waits_for_them(pair_of):
    pair = pair_of()
    both(
        pair,
        ("penalised", [5, 5, 5], 6, "", Sampling(frequency_penalty=1.5, ignore_eos=True)),
        ("repeated", [5, 9, 5], 6, "", Sampling(repetition_penalty=1.8, bad_words=((5,),), ignore_eos=True)),
        ("told", [5, 9], 6, "", Sampling(top_logprobs=2, ignore_eos=True)),
        ("masked", [8], 6, "", Sampling(allowed_token_ids=(4, 9, 30), min_tokens=3, stop_token_ids=(9, 30))),
    )
    same(pair, "repeated", "penalised", "told", "masked")
    told = [[one for e in d.events if e.request_id == "told" for one in e.logprobs] for d in pair]
    ours, theirs = ([one.logprob for one in each] for each in told)
    near("fp32: log probabilities of the cuda executor", ours, theirs, 1e-4)
    assert pair[0].engine.executor.followed == len(pair[0].batches) - 1


def beside_one_that_decodes(pair: tuple[Any, Any], sampling: Sampling, n_tokens: int) -> None:
    """A long prompt and a short one; then steps without a prompt are launched ahead again."""
    both(pair, ("beside", [7, 7], 12, "c", GREEDY))
    for driver in pair:
        driver.beat(2)
    both(pair, ("long", [(5 * i) % 60 for i in range(50)], n_tokens, "a", sampling), ("short", [4], 0, "", sampling))
    same(pair, "beside", "long", "short")
    assert pair[0].engine.executor.followed


@pytest.mark.numeric
@pytest.mark.slow
def test_log_probabilities_of_a_prompt_are_the_references_beside_rows_that_decode(pair_of):
    pair = pair_of()
    both(pair, ("alone", [4, 5, 9], 0, "", scored := Sampling(prompt_logprobs=3, top_logprobs=1, ignore_eos=True)))
    beside_one_that_decodes(pair, scored, 3)
    ours, theirs = (
        [(e.request_id, e.first, one) for e in each for one in e.logprobs] for each in events(pair, PromptLogprobs)
    )
    assert len(ours) == len(theirs) == 49 + 2
    for (key, first, one), (its_key, its_first, other) in zip(ours, theirs, strict=True):
        assert (key, first, [t for t, _ in one.top]) == (its_key, its_first, [t for t, _ in other.top])
        found, expected = ([each.logprob, *(v for _, v in each.top)] for each in (one, other))
        near("fp32: log probabilities of the cuda executor", found, expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.STOP])
def test_an_answer_that_ends_while_the_next_step_is_in_flight_has_no_token_more(pair_of, finish):
    """A stop token is its last one, an end of sequence is no part of it; beside it one is greedy or drawn."""
    first, _ = pair_of()
    first.post(first.request("long", [5, 9, 4], 6, sampling=GREEDY))
    first.finish()
    text, by_eos = first.answer("long"), finish is FinishReason.EOS
    end = text[3]
    pair = pair_of(**({"eos": frozenset({end})} if by_eos else {}))
    ending = Sampling() if by_eos else Sampling(stop_token_ids=(60, end), ignore_eos=True)
    beside = GREEDY if by_eos else Sampling(temperature=2.0, top_k=4, min_p=0.01, seed=9, ignore_eos=True)
    both(pair, ("stopped", [5, 9, 4], 6, "", ending), ("beside", [7, 7], 6, "c", beside))
    same(pair, "stopped", "beside")
    assert pair[0].answer("stopped") == text[: text.index(end) + (not by_eos)]
    assert {driver.ending("stopped").finish for driver in pair} == {finish}
    assert pair[0].engine.executor.followed


@pytest.mark.slow
def test_a_step_that_cannot_be_launched_ahead_costs_nobody_a_token(pair_of, caplog):
    pair = pair_of()
    both(pair, ("x", [5, 9, 4], 6, "a", GREEDY), ("y", [7, 7], 6, "", GREEDY))
    pair[0].engine.executor.fail_next = True
    same(pair, "x", "y")
    assert "its rows run alone" in caplog.text


@pytest.mark.slow
def test_warming_up_leaves_nothing_behind(pair_of):
    """A GPU warms up at start: every size of chunks, with and without adapters, and a draw."""
    pair = pair_of()
    pair[0].engine.executor.warm_up(17)
    both(pair, ("x", [5, 9, 4], 3, "a", GREEDY))
    same(pair, "x")


@pytest.mark.numeric
@pytest.mark.slow
def test_hidden_states_are_the_references_beside_rows_that_decode(pair_of):
    pair = pair_of()
    beside_one_that_decodes(pair, Sampling(pooling=True), 0)
    ours, theirs = ({e.request_id: e.vector for e in each} for each in events(pair, PooledState))
    assert set(ours) == set(theirs) == {"long", "short"}
    for key, vector in ours.items():
        found, expected = (np.frombuffer(each, "<f4") for each in (vector, theirs[key]))
        near("fp32: hidden states of the cuda executor", found, expected, 1e-4)

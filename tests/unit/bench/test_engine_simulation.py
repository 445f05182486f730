"""The engine simulation: laws that hold whatever a step costs, and cases that can be computed by hand."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft_bench.engine_request import EngineRequest
from weft_bench.engine_simulation import EngineLimits, EngineSimulation, PromptBatching, serve
from weft_sim.performance import StepShape


@dataclass(frozen=True)
class Linear:
    """10 ms a step, 1 ms a prompt token, 0.1 ms a row, 1 us a token of context: exact under jumps."""

    def seconds(self, step: StepShape) -> float:
        return 0.01 + 1e-3 * step.prompt_tokens + 1e-4 * step.decode_rows + 1e-6 * step.context_tokens


LIMITS = EngineLimits(kv_tokens=4_000, max_sequences=8, batch_tokens=64)
REQUESTS = st.lists(
    st.builds(EngineRequest, st.floats(0, 5), st.integers(1, 300), st.integers(1, 60), st.none() | st.integers(0, 5)),
    min_size=1,
    max_size=30,
)


def run(requests: list[EngineRequest], limits: EngineLimits) -> tuple[list[EngineRequest], EngineSimulation, list[int]]:
    most = list[int]()
    engine = EngineSimulation(Linear(), limits, lambda step, *_: most.append(step.adapters))
    return serve(engine, sorted(requests, key=lambda one: one.arrival_s)), engine, most


def copies(requests: list[EngineRequest]) -> list[EngineRequest]:
    return [EngineRequest(one.arrival_s, one.prompt_tokens, one.output_tokens, one.adapter) for one in requests]


@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    st.sampled_from(PromptBatching),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([400, 1_000, 4_000]),
)
def test_every_request_ends_once_and_memory_balances(
    requests: list[EngineRequest], batching: PromptBatching, reserve: bool, slots: int | None, kv_tokens: int
) -> None:
    limits = replace(LIMITS, batching=batching, reserve=reserve, slots=slots, kv_tokens=kv_tokens)
    ended, engine, adapters = run(requests, limits)
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    assert engine.idle
    assert engine.kv_used == 0
    assert all(one.made == one.output_tokens for one in ended)
    assert all(one.arrival_s < (one.first_s or 0) <= (one.last_s or 0) for one in ended)
    assert not (reserve and engine.preemptions)
    assert max(adapters) <= (slots or 6)


def test_one_request_takes_its_chunks_and_its_tokens() -> None:
    (one,), _, _ = run([EngineRequest(1.0, 100, 11)], LIMITS)
    assert one.ttft_s == pytest.approx(2 * 0.01 + 100e-3)
    assert one.e2e_s - one.ttft_s == pytest.approx(10 * (0.01 + 1e-4) + 1e-6 * sum(range(101, 111)))


@settings(max_examples=30, deadline=None)
@given(REQUESTS)
@example([EngineRequest(0.0, 1, 1), EngineRequest(0.0, 252, 54), EngineRequest(0.83203125, 1, 1)])  # in the last step
def test_jumps_change_no_time(requests: list[EngineRequest]) -> None:
    """An arrival that can do nothing at each step keeps the engine from jumping."""
    single, jumping = copies(requests), copies(requests)
    run(jumping, LIMITS)
    engine = EngineSimulation(Linear(), LIMITS)
    waiting = sorted(single, key=lambda one: one.arrival_s)
    while waiting or not engine.idle:
        while waiting and (waiting[0].arrival_s <= engine.now or engine.idle):
            engine.now = max(engine.now, waiting[0].arrival_s)
            engine.submit(waiting.pop(0))
        engine.iterate(engine.now)
    assert [one.last_s for one in single] == pytest.approx([one.last_s for one in jumping])


def test_an_adapter_without_a_slot_is_passed_by_those_that_have_one() -> None:
    requests = [EngineRequest(0.0, 10, 50, 0), EngineRequest(0.001, 10, 5, 1), EngineRequest(0.002, 10, 5, 0)]
    run(requests, replace(LIMITS, slots=1))
    first, other, same = (one.first_s or 0 for one in requests)
    assert first < same < (requests[0].last_s or 0) < other


def test_an_adapter_is_loaded_again_once_another_one_has_had_its_slot() -> None:
    seen = list[StepShape]()
    engine = EngineSimulation(Linear(), replace(LIMITS, slots=1), lambda step, *_: seen.append(step))
    serve(engine, [EngineRequest(float(at_s), 10, 2, adapter) for at_s, adapter in enumerate((0, 0, 1, 0))])
    assert [step.loads for step in seen if step.prompts] == [1, 0, 1, 1]


def test_requests_without_a_slot_are_passed_over_in_every_iteration() -> None:
    seen = list[StepShape]()
    engine = EngineSimulation(Linear(), replace(LIMITS, slots=1), lambda step, *_: seen.append(step))
    first, second, third = (EngineRequest(0.0, 10, 3, adapter) for adapter in (0, 1, 1))
    served = serve(engine, [first, second, third, EngineRequest(0.0, 10, 2, 0)])
    assert [step.passed_over for step in seen][:2] == [2, 2]
    assert seen[-1].passed_over == 0
    assert served[-1].adapter == 1


@pytest.mark.parametrize(("batching", "rows"), [(PromptBatching.PROMPTS_FIRST, 0), (PromptBatching.CHUNKED, 1)])
def test_prompts_first_stop_decode_rows_and_chunked_ones_do_not(batching: PromptBatching, rows: int) -> None:
    seen = list[StepShape]()
    limits = replace(LIMITS, batching=batching, batch_tokens=65)
    engine = EngineSimulation(Linear(), limits, lambda step, *_: seen.append(step))
    serve(engine, [EngineRequest(0.0, 10, 100), EngineRequest(0.05, 64, 2)])
    assert [step.decode_rows for step in seen if step.prompt_tokens == 64] == [rows]


def test_cached_tokens_are_not_computed() -> None:
    cold, warm = EngineRequest(0.0, 64, 1), EngineRequest(0.0, 64, 1, cached_tokens=48)
    run([cold], LIMITS)
    run([warm], LIMITS)
    assert cold.ttft_s - warm.ttft_s == pytest.approx(48e-3)


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        EngineSimulation(Linear(), LIMITS).submit(EngineRequest(0.0, 4_000, 10))

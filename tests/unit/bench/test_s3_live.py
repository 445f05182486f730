"""`weft bench s3 --part live`: what runner, predictor, clients and simulator are given is the same requests."""

import random
from pathlib import Path

import pytest

from weft.domain.prediction import Prediction, PredictItem
from weft_bench.errors import RequestFailed
from weft_bench.fidelity_live import LiveRun
from weft_bench.s3_lengths import Answered
from weft_bench.s3_live import (
    Workload,
    check_answers,
    prepared,
    scaled,
    times,
    with_prompts,
)
from weft_bench.sse import Streamed
from weft_bench.trace_executor import read_table
from weft_predictor.models import read_replay

SCALE = 4
TRACE = [Answered(70, tokens, Prediction("", 80, 200, "", 20, 400, 210)) for tokens in (1, 90, 300)]


@pytest.fixture
def work(tmp_path: Path) -> Workload:
    return prepared("LMSYS", with_prompts([scaled(one, SCALE) for one in TRACE * 100], 8, random.Random(0)), tmp_path)


def test_a_token_stands_for_several_of_the_trace_and_none_vanishes() -> None:
    one = scaled(TRACE[0], SCALE)
    assert (one.prompt_tokens, one.output_tokens) == (-(-70 // SCALE), 1)
    assert (one.predicted.p50_tokens, one.predicted.bucket_tokens) == (80 // SCALE, -(-210 // SCALE))
    assert scaled(Answered(1, 1, Prediction("", 1, 1, "", 1, 1)), SCALE).predicted.bucket_tokens == 0


def test_runner_and_predictor_find_each_request_in_their_files(work: Workload) -> None:
    table, model = read_table(work.table), read_replay(work.predictions)
    assert len({request.prompt for request in work.requests}) == len(table) == 300
    for request in work.requests:
        answered = request.answered
        assert len(request.prompt.split()) == answered.prompt_tokens == table[request.seed].prompt_tokens
        assert table[request.seed].output_tokens == answered.output_tokens
        (predicted,) = model.predict_batch([PredictItem("gateway's own", request.prompt, "", "", 1, 0)])
        assert (predicted.p50_tokens, predicted.p99_tokens) == (20, 100)


def test_the_simulator_is_given_the_same_requests_at_the_same_times(work: Workload) -> None:
    at_s = times([1.0] * 300, 2.0)
    arrivals = work.arrivals(at_s)
    assert [one.at_s for one in arrivals[:3]] == [0.5, 1.0, 1.5]
    assert all(one.stops and one.max_tokens == 2_048 for one in arrivals)
    assert [one.output_tokens for one in arrivals] == [one.answered.output_tokens for one in work.requests]


def test_an_answer_that_is_not_the_traces_ends_the_run(work: Workload) -> None:
    right = [Streamed(0.0, 0.1, 0.2, one.answered.output_tokens, stopped=True) for one in work.requests]
    check_answers(work, LiveRun(tuple(right), (), {}, 0.0, 1.0))
    for wrong in (Streamed(0.0, 0.1, 0.2, 2_048), Streamed(0.0, 0.1, 0.2, right[-1].tokens)):
        with pytest.raises(RequestFailed, match="request 300 of LMSYS: cut"):
            check_answers(work, LiveRun((*right[:-1], wrong), (), {}, 0.0, 1.0))

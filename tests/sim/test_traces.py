"""Trace files of the formats in use, and drawn arrivals."""

import gzip
from itertools import islice, pairwise
from pathlib import Path

import pytest

from weft.domain.prediction import Prediction
from weft_sim.clock import random_of
from weft_sim.traces import TraceArrival, TraceError, adapter_draw, poisson, read

FORMATS = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n",
    "splitwise.csv": "request_id,arrival_timestamp,prompt_size,token_size\n0,2.5,374,44\n1,6.814579,396,109\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": []}\n'
    '{"timestamp": 4314.579, "input_length": 396, "output_length": 109, "hash_ids": []}\n',
}


@pytest.mark.parametrize("name", FORMATS)
def test_public_traces_are_read_from_time_zero_on(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FORMATS[name])
    with gzip.open(tmp_path / f"{name}.gz", "wt") as file:
        file.write(FORMATS[name])
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        first, second = read(path)
        assert first == TraceArrival(0.0, 374, 44)
        assert (second.prompt_tokens, second.output_tokens) == (396, 109)
        assert second.at_s == pytest.approx(4.314579, abs=1e-5)


def test_our_own_format_names_adapters(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,adapter\n0,1,1,b\n1,1,1,a\n2,1,1,b\n3,1,1,\n"
    )
    assert [arrival.adapter for arrival in read(tmp_path / "own.csv")] == [0, 1, 0, -1]


def test_our_own_format_has_limits_and_predictions(tmp_path: Path) -> None:
    columns = "arrival_s,prompt_tokens,output_tokens,max_tokens,p10_tokens,p50_tokens,p90_tokens,p99_tokens"
    (tmp_path / "own.csv").write_text(f"{columns}\n0,1,9,99,2,8,20,50\n1,1,9,,,,,\n")
    first, second = read(tmp_path / "own.csv")
    assert (first.max_tokens, first.predicted) == (99, Prediction("", 8, 20, "trace", 2, 50))
    assert (second.max_tokens, second.predicted) == (0, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [("a,b\n1,2\n", "line 2"), ("", "no requests"), ("arrival_s,prompt_tokens,output_tokens\nx,1,1\n", "line 2")],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(TraceError, match=why):
        read(tmp_path / "bad.csv")


def test_adapters_are_drawn_as_punica_draws_them() -> None:
    chance = random_of(1)
    assert list(islice(adapter_draw("distinct", 3, chance), 5)) == [0, 1, 2, 0, 1]
    assert set(islice(adapter_draw("identical", 3, chance), 5)) == {0}
    assert set(islice(adapter_draw("uniform", 0, chance), 5)) == {-1}
    skewed = list(islice(adapter_draw("skewed", 8, chance), 2000))
    assert skewed.count(0) > 2 * skewed.count(1) > skewed.count(7)


def test_poisson_arrivals_keep_their_rate() -> None:
    arrivals = poisson(50.0, 2000, [(10, 5)], adapter_draw("uniform", 2, random_of(3)), random_of(2))
    assert arrivals[-1].at_s == pytest.approx(40.0, rel=0.1)
    assert all(b.at_s >= a.at_s for a, b in pairwise(arrivals))

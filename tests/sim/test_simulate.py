"""`weft sim`: a trace on a described pool."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft.domain.prediction import Prediction
from weft_cli.main import main
from weft_sim.clock import random_of
from weft_sim.report import histogram, lines, quantile
from weft_sim.simulate import BadPool, PoolDescription, example, pool_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival, adapter_draw, poisson

TRACE = "arrival_s,prompt_tokens,output_tokens,adapter\n0,40,10,a\n0.1,30,5,b\n0.2,200,20,\n"


def test_a_trace_is_answered_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, timeline = tmp_path / "trace.csv", tmp_path / "timeline.json"
    trace.write_text(TRACE)
    assert main(["sim", str(trace), "--set", "runners=2", "--set", "cpu=false", "--timeline", str(timeline)]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 requests answered" in printed
    for word in ("TTFT", "time per token", "end to end", "utilization", "runner-1"):
        assert word in printed
    assert timeline.stat().st_size > 1000


def test_times_follow_the_runners_profile() -> None:
    pool = PoolDescription(
        step_ms_1=10.0, step_ms_best=25.0, best_batch=16, prefill_tokens_per_s=1000.0, adapters=0, cpu=False
    )
    arrivals = [TraceArrival(float(second), 50, 11) for second in range(4)]
    for one in simulate(pool, arrivals).figures.served:
        assert one.tokens == 11
        assert one.tpot_ms == pytest.approx(10.0)
        assert 50 + 9 <= one.ttft_ms <= 50 + 9 + 10


@pytest.mark.parametrize(
    "policy", ['queue="s3"', 'queue="shortest"', 'reservation="paged"', 'reservation="pooled"', 'reservation="max"']
)
def test_a_pool_is_served_under_every_policy(policy: str) -> None:
    arrivals = [TraceArrival(0.02 * i, 20 + i, 10 + 7 * i % 90) for i in range(40)]
    pool = pool_of(None, [policy, "total_pages=60", "max_context_tokens=300", "adapters=0", "cpu=false"])
    assert len(simulate(pool, arrivals).figures.served) == 40


@pytest.mark.parametrize(("mode", "emptied"), [("always", 1), ("never", 0)])
def test_consolidation_empties_a_runner_and_every_law_holds(mode: str, emptied: int) -> None:
    pool = PoolDescription(
        runners=2, max_sequences=4, best_batch=4, adapters=2, cpu=False, consolidation=mode, consolidation_s=1.0
    )
    arrivals = [TraceArrival(0.001 * i, 20, 200 if i % 4 == 0 else 10, i % 2) for i in range(8)]  # four fill a runner
    worlds: list[World] = []
    figures = simulate(pool, arrivals, check=True, attach=worlds.append).figures
    laws = worlds[0].laws
    assert len(figures.served) == 8
    assert sum(laws.consolidations.values()) == emptied
    assert min(figures.utilization.values()) < 0.7 or not emptied


def test_more_load_waits_longer_and_more_runners_help() -> None:
    arrivals = poisson(8.0, 60, [(64, 32)], adapter_draw("skewed", 8, random_of(1)), random_of(2))
    one, three = (
        quantile(
            [
                r.e2e_ms
                for r in simulate(PoolDescription(runners=n, max_sequences=4, cpu=False), arrivals).figures.served
            ],
            0.9,
        )
        for n in (1, 3)
    )
    assert three < one / 2


def test_a_description_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(example())
    assert pool_of(path) == PoolDescription()
    assert pool_of(path, ["runners=3", 'popularity="uniform"']) == PoolDescription(runners=3, popularity="uniform")
    for change in ("nonsense=1", "runners=-1", "runners=1.5", 'runners="x"', "cpu=1", "runners", 'queue="lifo"'):
        with pytest.raises(BadPool):
            pool_of(path, [change])


@pytest.mark.parametrize("arguments", [[], ["/nonexistent.csv"], ["/dev/null"]])
def test_bad_input_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *arguments]) == 2
    assert capsys.readouterr().err.startswith("weft: ")


def test_quantiles_and_bars() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert histogram([1.0, 1.0, 2.0], 2) == "1 |█▄| 2"
    assert histogram([1.0, 1.0]) == ""


def test_watched_or_not_times_are_the_same() -> None:
    pool = PoolDescription(max_sequences=4, total_pages=64, reservation="paged", adapters=2, cpu=False)
    arrivals = [TraceArrival(0.01 * i, 20, 5 + 9 * (i % 7), i % 2, stops=i % 3 == 0, max_tokens=90) for i in range(30)]
    watched, plain = (simulate(pool, arrivals, check=check).figures for check in (True, False))
    assert watched.served == plain.served
    assert sorted(one.tokens for one in plain.served) == sorted(one.output_tokens for one in arrivals)


def test_predictions_of_the_trace_decide_what_is_reserved_and_who_is_first() -> None:
    pool = PoolDescription(max_sequences=1, adapters=0, cpu=False, queue="shortest")

    def ended(first: int, second: int) -> list[float]:
        predicted = [Prediction("", tokens, tokens, "", tokens, tokens) for tokens in (10, 10, first, second)]
        lengths = zip((10, 10, first, second), predicted, strict=True)
        arrivals = [TraceArrival(0.01 * i, 8, n, max_tokens=99, predicted=p) for i, (n, p) in enumerate(lengths)]
        return [one.ttft_ms for one in simulate(pool, arrivals).figures.served]

    _, _, long, short = ended(60, 5)
    assert short < long
    _, _, early, late = ended(5, 60)
    assert early < late


@pytest.mark.slow
def test_prompts_on_runners_of_their_own_cost_running_answers_nothing_and_every_law_holds() -> None:
    """Splitwise, figure 3: prompts in the batch are what makes the time between tokens long."""
    arrivals = [TraceArrival(0.2 * n, 400 if n % 4 == 0 else 20, 4 if n % 4 == 0 else 60) for n in range(80)]
    p99, drawn = dict[str, float](), dict[str, str]()
    for phases in ("unified", "split"):
        pool = PoolDescription(
            runners=4, adapters=3, page_kib=64.0, phases=phases, cpu=False, token_time_ms=100.0, adapter_mib=0.1
        )
        figures = simulate(pool, arrivals, check=True, tbt=True).figures
        assert len(figures.served) == len(arrivals)
        assert len(figures.gaps_s) == sum(one.tokens - 1 for one in figures.served)
        p99[phases], drawn[phases] = quantile(figures.gaps_s, 0.99), "\n".join(lines(figures))
    assert p99["split"] < 0.6 * p99["unified"]
    assert "PPPP" in drawn["split"]
    assert "TTTT" in drawn["split"]
    assert "roles" not in drawn["unified"]


def test_batching_mechanisms_differ_as_splitwise_says() -> None:
    """Section 2.5: request-level batching makes arrivals wait, continuous batching stops running rows for prompts."""
    arrivals = [TraceArrival(0.08 * i, 400, 20) for i in range(20)]
    pool = PoolDescription(adapters=0, cpu=False, max_batch_tokens=512)
    ttft, slowest = dict[str, float](), dict[str, float]()
    for batching in ("mixed", "continuous", "request"):
        figures = simulate(replace(pool, batching=batching), arrivals, check=True, tbt=True).figures
        assert len(figures.served) == len(arrivals)
        ttft[batching] = quantile([one.ttft_ms for one in figures.served], 0.5)
        slowest[batching] = quantile(figures.gaps_s, 0.99)
    assert ttft["request"] > 1.5 * max(ttft["mixed"], ttft["continuous"])
    assert slowest["continuous"] > 1.5 * slowest["mixed"]

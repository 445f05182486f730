"""`make gpu-bench` under the interpreter: every case with tiny shapes, the page, and the command as a whole.

So that it works at the first try where a GPU is lent for half an hour.
"""

import gc
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft_bench import gpu as command
from weft_bench.cpu_shapes import DISTINCT, RANK
from weft_bench.gpu_amounts import TINY, Batch
from weft_bench.gpu_context import Context
from weft_bench.gpu_exact import PROJECTIONS, oracle
from weft_bench.gpu_operator import check, made
from weft_bench.gpu_page import BEYOND_FLOOR, DOCS, ERROR, ERROR_RATIO, wanted, write_page
from weft_stage.errors import OutOfTime, WrongAdapter
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Numbers, peft_tensors, random_weights, spec_of
from weft_stage.lines import Line, read

METRICS = {  # figures of a case: what a page without them would miss
    "exact": {"largest error of a row", "likeliest token is fp32's: ours"},
    "steps": {
        "step p50",
        "step p99",
        "of the bandwidth",
        "added by adapters",
        "added beyond the bytes",
        "the host's part",
        "base",
        "base: the host launches for",
        "graphs captured",
        "memory of graphs",
        "with adapters / base",
    },
    "streams": {"output tokens", "output tokens, steady", "TTFT p50", "gap between tokens p99", "loading, each"},
    "stack": {"ready after", "output tokens", "of the engine alone", "TTFT p99", "gap between tokens p50"},
    "operator": {"time p50", "time p99", "of the bandwidth", "a loop over adapters / ours"},
    "attention": {"time p50", "time p99", "keys and values"},
    "offload": {"weights that stay", "pass p50", "copied to the device", "output tokens"},
    "slots": {"TTFT p50", "hit rate", "one load p50", "TTFT p50 / (warm TTFT p50 + one load p50)"},
    "textgen": {"prompt and output tokens", "kept of the base's rate", "rows of a step"},
    "peft": {"prefill", "decode step", "whole run"},
}
# less than the floor; the oracle's own error in fp32 is none
NOTHING_HERE = {BEYOND_FLOOR, ERROR_RATIO}


@pytest.fixture(scope="module", autouse=True)
def less_garbage() -> Generator[None]:
    """Every case collects garbage: not among the modules of this process."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("case", command.CASES)
def test_a_case_measures_its_figures_and_what_the_page_wants_of_it(case: str, tmp_path: Path) -> None:
    lines: list[Line] = []
    assert not command.measure([case], TINY, lines.append, "make gpu-bench", tmp_path)
    torch.set_num_threads(1)  # what is tiny gains nothing by a second one
    lines = [line for line in lines if not line.of_machine]
    names = [(line.case, line.metric) for line in lines]
    assert {metric for _, metric in names} >= METRICS[case]
    assert {(each.case, each.metric) for each in wanted(TINY).get(case, ())} <= {*names}
    assert len(names) == len({*names})
    assert {line.metric for line in lines if line.value is None} <= NOTHING_HERE
    assert case != "exact" or all(line.value is None or line.value < 1e-5 for line in lines if line.metric == ERROR)
    assert case != "peft" or all(line.value and line.baseline for line in lines)


def test_an_operator_with_another_adapter_is_no_figure(gpu: Gpu) -> None:
    case = made(gpu, TINY.operators[0][0], Batch(2, DISTINCT))
    check(case)
    first, second = case.dense.segments
    case.dense.segments[:] = [replace(first, a=second.a, b=second.b), replace(second, a=first.a, b=first.b)]
    with pytest.raises(WrongAdapter, match="off by"):
        check(case)


# ---- the page


def test_the_page_is_current(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    raw = DOCS / "raw" / "gpu.jsonl"
    if raw.exists():
        (tmp_path / "raw" / raw.name).write_text(raw.read_text())
    assert write_page(tmp_path).read_text() == (DOCS / "gpu.md").read_text(), "python -m weft_bench.gpu --page"


# ---- the command


@pytest.mark.slow
def test_a_case_that_breaks_off_costs_itself_alone_and_is_named(tmp_path: Path) -> None:
    """The one that breaks off is known to nobody but the command line."""
    code = (
        "import sys, weft_bench.gpu as gpu; gpu.CASES = dict(beauty=1, attention=1); sys.exit(gpu.main(sys.argv[1:]))"
    )
    words = ["--budget-s", "3600", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "beauty: 0 s, broke off: ModuleNotFoundError" in said
    assert f"make gpu-bench GPU_FLAGS='--budget-s 3600 --out {tmp_path} beauty'" in said
    lines = read(tmp_path / "raw" / "gpu.jsonl")[len(read(DOCS / "raw" / "gpu.jsonl")) :]
    assert METRICS["attention"] <= {line.metric for line in lines}
    assert {line.command for line in lines} == {f"make gpu-bench GPU_FLAGS='--budget-s 3600 --out {tmp_path.name}'"}
    assert "keys and values" in (tmp_path / "gpu.md").read_text()


def test_a_case_whose_time_is_over_amid_its_requests_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[str]()

    def end_at_the_fifth(context: Context) -> None:
        calls.append(context.amounts.model)
        if len(calls) == 5:
            raise OutOfTime("no time was left")

    monkeypatch.setattr(Context, "check_time", end_at_the_fifth)
    lines: list[Line] = []
    assert command.measure(["streams", "attention"], TINY, lines.append, "make gpu-bench", tmp_path) == ["streams"]
    assert "engine made" in {line.metric for line in lines}
    assert METRICS["attention"] <= {line.metric for line in lines}, "the next case runs"
    assert "streams: " in (said := capsys.readouterr().out)
    assert "not whole: no time was left" in said


def test_a_case_leaves_the_others_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes all of its own; what one leaves is for those that follow."""
    monkeypatch.setattr(command, "CASES", {"a": 60, "b": 30, "c": 10})
    assert command.share_end(["a", "b", "c"], 100.0, 200.0) == 160.0
    assert command.share_end(["b", "c"], 160.0, 200.0) == 190.0
    assert command.share_end(["b", "c"], 120.0, 200.0) == 180.0
    assert command.share_end(["c"], 195.0, 200.0) == 200.0


@pytest.mark.numeric
@pytest.mark.slow  # as is all that imports transformers and peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_the_oracle_of_an_8b_has_the_frequencies_of_a_loaded_checkpoint() -> None:
    """bf16 weights, fp32 frequencies: rounded ones made every logit of an H100 look wrong."""
    spec = spec_of(TINY.shape, 64)
    weights = random_weights(spec, Numbers(torch.device("cpu"), torch.bfloat16))
    adapters = {"x": peft_tensors(spec, dict.fromkeys(PROJECTIONS, RANK), 1, torch.bfloat16)}
    model = oracle(spec, weights, adapters)
    assert next(model.parameters()).dtype == torch.bfloat16
    frequencies = model.get_base_model().model.rotary_emb.inv_freq
    expected = spec.ropes[0].theta ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)

"""`make gpu-bench` under the interpreter: every case with tiny shapes, so that it works at once on a GPU."""

import gc
import re
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from weft_bench.cases import GPU_CASES, Gpu
from weft_bench.cpu_shapes import DEVICE_SHAPES, RANK
from weft_bench.figures import gpu, gpu_exact
from weft_bench.run import Run
from weft_stage.errors import BenchFailed
from weft_stage.gpu_models import PROJECTIONS, Numbers, peft_tensors, random_weights, spec_of
from weft_stage.lines import MACHINE

ERROR = "largest error of a row"
METRICS = {  # that a page would lack
    "exact": {ERROR, "likeliest token is fp32's: ours"},
    "steps": {
        "step p50", "step p99", "of the bandwidth", "added by adapters", "added beyond the bytes", "the host's part",
        "base", "base: the host launches for", "graphs captured", "memory of graphs", "with adapters / base",
    },
    "streams": {"output tokens", "output tokens, steady", "TTFT p50", "gap between tokens p99", "loading, each"},
    "stack": {"ready after", "output tokens", "of the engine alone", "TTFT p99", "gap between tokens p50"},
    "operator": {"time p50", "time p99", "of the bandwidth"},
}  # fmt: skip
# less than the floor; the oracle's own error in fp32 is none
NOT_HERE = {"of the bandwidth, beyond the launch floor", f"{ERROR} / transformers + PEFT's in bf16"}


@pytest.fixture(scope="module", autouse=True)
def less_garbage() -> Generator[None]:
    """Every case collects garbage: not among the modules of this process."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("case", GPU_CASES)
def test_a_case_measures_its_figures(case: str, tmp_path: Path) -> None:
    measured = gpu.figures(Gpu((case,), budget_s=3600), Run("gpu", tmp_path))
    lines = [line for line in measured if not line.case.startswith(MACHINE)]
    torch.set_num_threads(1)  # what is tiny gains nothing by a second one
    names = [(line.case, line.metric) for line in lines]
    assert {metric for _, metric in names} >= METRICS[case]
    assert len(names) == len({*names})
    assert {line.metric for line in lines if line.value is None} <= NOT_HERE
    assert all(line.target is None for line in lines)
    assert all(line.value is None or line.value < 1e-5 for line in lines if line.metric == ERROR)


def test_a_case_that_breaks_off_costs_itself_alone_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.MODULES, "exact", "gpu_beauty")
    ends = iter([1e12, 0.0, 1e12])  # no time for streams
    monkeypatch.setattr(gpu, "share_end", lambda *_: next(ends))
    run = Run("gpu", tmp_path)
    with pytest.raises(BenchFailed, match=r"add --cases exact,streams$"):
        run.lines.extend(gpu.figures(Gpu(("exact", "streams", "operator")), run))
    assert METRICS["operator"] <= {line.metric for line in run.lines}
    told = capsys.readouterr().err
    assert re.search(r"exact: \d+ s, broke off: ModuleNotFoundError", told)
    assert re.search(r"streams: \d+ s, incomplete: no time was left", told)


def test_a_case_leaves_the_others_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case may take all of its share; what it leaves is for the cases that follow."""
    monkeypatch.setattr(gpu, "GPU_CASES", {"a": 60, "b": 30, "c": 10})
    assert gpu.share_end(["a", "b", "c"], 100.0, 200.0) == 160.0
    assert gpu.share_end(["b", "c"], 160.0, 200.0) == 190.0
    assert gpu.share_end(["b", "c"], 120.0, 200.0) == 180.0
    assert gpu.share_end(["c"], 195.0, 200.0) == 200.0


@pytest.mark.parametrize(
    ("reason", "absent", "code"), [("the driver finds no GPU", "", gpu.NO_GPU), ("", "no torch", gpu.MISSING)]
)
def test_without_a_gpu_or_a_package_nothing_is_measured(
    reason: str, absent: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("interpreted", False), ("no_gpu", reason), ("missing", absent)):
        monkeypatch.setattr(gpu, name, lambda *_, value=value: value)
    with pytest.raises(SystemExit) as ended:
        list(gpu.figures(Gpu(), Run("gpu", tmp_path)))
    assert ended.value.code == code


@pytest.mark.numeric
@pytest.mark.slow  # as is all that imports transformers and peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_the_oracle_of_an_8b_has_the_frequencies_of_a_loaded_checkpoint() -> None:
    """bf16 weights, fp32 frequencies: rounded ones made every logit of an H100 look wrong."""
    spec = spec_of(DEVICE_SHAPES["tiny"], 64)
    weights = random_weights(spec, Numbers(torch.device("cpu"), torch.bfloat16))
    adapters = {"x": peft_tensors(spec, dict.fromkeys(PROJECTIONS, RANK), 1, torch.bfloat16)}
    model = gpu_exact.oracle(spec, weights, adapters)
    assert next(model.parameters()).dtype == torch.bfloat16
    frequencies = model.get_base_model().model.rotary_emb.inv_freq
    expected = spec.ropes[0].theta ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)

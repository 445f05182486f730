"""What a step is to the cost model, and that an offloading executor predicts the passes that it measures."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from harness.native_library import native_library
from harness.native_models import Scales, adapter_tensors, make_step, offload_executor, write_model
from weft_runner.model import read_spec
from weft_runner.model.cpu.machine_rates import measure_rates
from weft_runner.model.tiers.pass_work import pass_work
from weft_runner.offload import Formats, model_sizes
from weft_runner.shell.metrics import OffloadSeries

native_library()  # skips where nothing can be built


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_model(tmp_path / "model", 7, num_hidden_layers=3)


@pytest.mark.slow
def test_a_pass_is_predicted_from_what_its_step_has(files: dict[str, Path], tmp_path: Path) -> None:
    spec = read_spec(files["config.json"])
    sizes = {"dtype": "bf16", "threads": 1, "pages": 16, "page_tokens": 16, "slots": 2}
    machine = measure_rates(tmp_path, spec, ["bf16"], "bf16", 1)
    limits = {"max_tokens": 64, "max_sequences": 8, "max_rank": 8, "share": 0.4}
    executor = offload_executor(files, tmp_path, sizes, machine=machine, **limits)
    try:
        adapter = executor.adapters.build(adapter_tensors(spec, 1, {"q_proj": 8}), Scales())
        executor.adapters.put(1, adapter)
        sizes = model_sizes(spec, Formats())
        step = make_step([([1] * 10, 0, [0], None), ([2], 30, [1, 2], 1), ([3], 5, [3], 1)])
        work = pass_work(step, sizes, executor.adapters.n_bytes)
        assert (work.tokens, work.sampled, work.keys, work.pairs) == (12, 3, 31 + 6, 55)
        assert work.adapter_bytes == adapter.n_bytes
        executor.run(step)
        executor.run(make_step([([4], 31, [1, 2], 1)]))
        executor.run(make_step([([4], 32, [1, 2, 3], 1)]), last=2)  # a part of a pass is not predicted
        figures, state = executor.figures.accuracy, executor.stage_state.state
        assert figures is not None
        registry = CollectorRegistry()
        registry.register(OffloadSeries(lambda: [executor.figures]))
        assert figures.passes == 2
        assert 0.0 < figures.token_predicted_s < figures.predicted_s
        assert 0.0 < figures.token_measured_s < figures.measured_s < executor.figures.step_s
        token, predicted = {"stage": "0", "of": "measured"}, "weft_runner_offload_predicted_seconds_total"
        assert registry.get_sample_value(predicted, {"stage": "0"}) == figures.predicted_s
        assert registry.get_sample_value("weft_runner_offload_token_seconds", token) == figures.token_measured_s
        assert (state.resident_share, state.measured_ms) == (executor.residency.share, 1e3 * figures.token_measured_s)
        assert state.disk_bytes_per_s > 0.0
        assert figures.alone_s == pytest.approx(figures.token_predicted_s, rel=0.5)
    finally:
        executor.close()

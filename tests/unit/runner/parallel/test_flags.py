"""What a runner is told about splitting, what that takes, and what a lost rank is to the engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.ranks import settings_of
from weft.domain.model.config import parse_spec
from weft.domain.request import Sampling
from weft_runner.errors import ExecutorLost, ExecutorUnavailable, OutOfMemory
from weft_runner.executors import ModelSource, make_executor
from weft_runner.memory_estimate import MemoryLimit, estimate_memory


def test_more_processes_than_a_runner_may_have_are_refused(capsys):
    with pytest.raises(SystemExit):
        settings_of(tensor_parallel=8, pipeline_parallel=9)
    assert "--tensor-parallel times --pipeline-parallel is 72, above 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel": 2, "host": "1/2"},
        {"tensor_parallel": 2, "host": "2/2", "leader": "a:1"},
        {"tensor_parallel": 2, "host": "1", "leader": "a:1"},
        {"tensor_parallel": 2, "host": "0/0", "leader": "a:1"},
        {"tensor_parallel": 2, "leader": "a:1"},
        {"host": "1/2", "leader": "a:1"},
        {"tensor_parallel": 4, "host": "0/3", "leader": "a:1"},
    ],
)
def test_several_hosts_name_rank_0s_address_and_have_as_many_ranks_each(flags, capsys):
    with pytest.raises(SystemExit):
        settings_of(**flags)
    assert "--host" in capsys.readouterr().err
    assert settings_of(tensor_parallel=2).ranks_here == range(2)
    for index in (0, 1):  # pods of one template have the same flags but for this one
        found = settings_of(tensor_parallel=4, host=f"{index}/2", leader="a:1", advertise="b:2")
        assert (found.ranks_here, found.ranks_listen) == (range(2 * index, 2 * index + 2), "b:1")


@pytest.mark.parametrize(("sees", "takes"), [(False, "reference"), (True, "cuda")])
@pytest.mark.parametrize(("how", "maker"), [("tensor", "TensorParallel"), ("pipeline", "PipelineParallel")])
def test_auto_splits_over_gpus_wherever_there_is_one(sees, takes, how, maker, small_config, monkeypatch):
    """Too few of them for the parts is an error then: a split model on a CPU is nothing that anybody wants unasked."""
    made: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: sees)
    monkeypatch.setattr("weft_runner.executors.cuda._devices", lambda *_: [])
    for module in ("cuda", "split"):
        gpu = SimpleNamespace(device=torch.device("cpu"))
        monkeypatch.setattr(f"weft_runner.executors.{module}.find_gpu", lambda gpu=gpu: gpu)
    monkeypatch.setattr(
        "weft_runner.executors.split.launch_ranks", lambda start, *_, **__: made.append(start.settings.executor)
    )
    monkeypatch.setattr(
        f"weft_runner.executors.split.{maker}Executor", lambda *_: SimpleNamespace(others=SimpleNamespace(pids=()))
    )
    base = ModelSource(parse_spec(small_config | {"vocab_size": 64}), {}, 1, lambda: False)
    make_executor(settings_of(executor="auto", **{f"{how}_parallel": 2}), base)
    assert made == [takes]


def test_too_few_gpus_are_told_by_number(small_config, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    base = ModelSource(parse_spec(small_config | {"vocab_size": 64}), {}, 1, lambda: False)
    with pytest.raises(ExecutorUnavailable, match="--tensor-parallel 2: torch sees 0 GPUs, and GPU 0 is needed"):
        make_executor(settings_of(executor="auto", tensor_parallel=2), base)


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_has_the_embedding_and_shared_key_value_heads_of_its_own(small_config, tied):
    spec = parse_spec(small_config | {"tie_word_embeddings": tied, "vocab_size": 64})
    sizes = {"kv_pages": 10, "page_tokens": 4}
    whole, two, four = (estimate_memory(spec, "reference", **sizes, ranks=ranks) for ranks in (1, 2, 4))
    embedding = 64 * 32 * 4
    assert (two.layers, two.kv_pages, two.embedding) == (whole.layers, whole.kv_pages, whole.embedding + embedding)
    assert (four.kv_pages, four.embedding) == (2 * whole.kv_pages, whole.embedding + 3 * embedding)


@pytest.mark.parametrize("how", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_that_find_no_room_on_this_machine_are_not_started(how, small_config, monkeypatch):
    monkeypatch.setattr("weft_runner.executors.memory.available_memory", lambda: MemoryLimit(1000, "this machine"))
    spec = parse_spec(small_config | {"vocab_size": 64})
    with pytest.raises(OutOfMemory, match="this machine has"):
        make_executor(settings_of(**{how: 2}), ModelSource(spec, {}, 1))


def failing(*_: Any, **__: Any) -> Any:
    raise ExecutorLost("rank 1 of the model is lost")


def test_a_lost_rank_ends_the_engine_and_no_row_is_tried_alone(drive):
    driver = drive()
    driver.post(*(driver.request(f"r{i}", [3, 4], sampling=Sampling()) for i in range(3)))
    calls: list[Any] = []
    driver.engine.executor.run = lambda *step, **_: [calls.append(step), failing()]
    with pytest.raises(ExecutorLost, match="rank 1"):
        driver.finish()
    assert len(calls) == 1


def test_a_rank_that_is_lost_while_nothing_runs_ends_the_engine(drive):
    driver = drive()
    driver.post(ExecutorLost("rank 1 of the model is lost"))
    with pytest.raises(ExecutorLost, match="rank 1"):
        driver.beat()

"""The executor that serves, and what is said where it is not the one that was hoped for."""

import ctypes
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest

from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu import NativeUnavailable
from weft_runner.errors import ExecutorUnavailable, OutOfMemory
from weft_runner.executors import ModelSource, cpu, make_executor, memory, settle_executor
from weft_runner.memory_estimate import REQUESTS_BYTES, MemoryLimit
from weft_runner.settings import RunnerSettings, parse_settings

FLAGS = [
    "--listen=127.0.0.1:1", "--probes=127.0.0.1:2", "--supervisor=127.0.0.1:3", "--depot=http://127.0.0.1:4",
    "--data-dir=/tmp/x", "--pool=a/b", "--base-digest=sha256:" + "a" * 64, "--kv-pages=8",
]  # fmt: skip


def no_fault(spec: ModelSpec) -> None:
    del spec


def odd_heads(spec: ModelSpec) -> str:
    del spec
    return "head_dim 7 is odd"


def settings(*flags: str) -> RunnerSettings:
    return parse_settings([*FLAGS, *flags])


@pytest.fixture
def base(world) -> ModelSource:
    return ModelSource(world.spec, {path.name: path for path in world.base.iterdir()}, 1, lambda: False)


@pytest.fixture
def no_library(monkeypatch) -> None:
    """A machine without a compiler: nothing else can be faked for it, there is one here."""

    def load(*args: Any) -> Any:
        raise NativeUnavailable("no compiler: tried c++, g++, clang++")

    monkeypatch.setattr(cpu, "load", load)


@pytest.fixture
def any_model(monkeypatch) -> None:
    """The small model's sizes do not matter: the library is what is missing."""
    monkeypatch.setattr(cpu, "unsupported_reason", no_fault)


def test_without_a_gpu_driver_torch_is_not_imported(world, any_model, monkeypatch):
    def no_driver(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    monkeypatch.setitem(sys.modules, "weft_runner.executors.cuda", None)  # an import of it is an error
    assert settle_executor(settings(), world.spec)[0].executor == "cpu"


def test_memory_that_holds_the_model_and_no_requests_is_too_little(base, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: MemoryLimit(REQUESTS_BYTES, "this container"))
    with pytest.raises(OutOfMemory, match=r"requests 0\.03 GiB\), and this container has 0\.03 GiB left"):
        make_executor(settings("--executor=reference"), base)


def test_reference_is_what_it_is_asked_to_be(base):
    assert make_executor(settings("--executor=reference"), base).numerics_class.startswith("reference/")


def test_without_a_library_the_reference_serves_and_the_log_says_why_and_what_it_costs(
    base, no_library, any_model, caplog
):
    with caplog.at_level(logging.WARNING, "weft_runner.executors"):
        executor = make_executor(settings(), base)
    assert executor.numerics_class.startswith("reference/")
    (record,) = caplog.records
    said = record.__dict__["kv"]
    assert "no compiler" in said["reason"]
    assert "several times the time" in said["cost"]


@pytest.fixture
def no_torch(monkeypatch) -> None:
    """An installation of the extra `runner` alone."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--executor=reference", "--executor reference"),
        ("--executor=cuda", "--executor cuda"),
        ("--tensor-parallel=2", "--tensor-parallel"),
        ("--pipeline-parallel=2", "--pipeline-parallel"),
    ],
)
def test_without_torch_what_needs_it_is_refused_and_the_extra_is_named(base, no_torch, flag, named):
    with pytest.raises(ExecutorUnavailable, match=rf"{named}.*: torch is not installed: pip install 'weft\[torch\]'"):
        make_executor(settings(flag), base)


def test_without_torch_a_model_that_the_native_executor_cannot_serve_is_refused_with_every_reason(
    base, no_torch, no_library, any_model
):
    why = "torch is not installed: pip install 'weft[torch]'"
    with pytest.raises(ExecutorUnavailable) as refused:
        make_executor(settings(), base)
    assert str(refused.value) == (
        f"the cuda executor: {why}; the cpu executor: no compiler: tried c++, g++, clang++; "
        f"the reference executor: {why}"
    )


def test_a_model_that_the_native_executor_cannot_offload_is_not_served_whole_instead(base, no_library, any_model):
    with pytest.raises(ExecutorUnavailable, match=r"no compiler.*; the reference executor: it does not offload"):
        make_executor(settings("--offload=device=1000"), base)


def test_a_pod_names_its_dtype_in_its_environment(monkeypatch, capsys):
    monkeypatch.setenv("WEFT_DTYPE", "int4")
    assert settings().dtype == "int4"
    assert settings("--dtype=fp32").dtype == "fp32"
    monkeypatch.setenv("WEFT_DTYPE", "fp64")
    with pytest.raises(SystemExit):
        settings()
    assert "WEFT_DTYPE 'fp64' is none of bf16, fp32, int8, int4" in capsys.readouterr().err


def test_kv_in_int4_and_sparse_attention_are_the_cpu_executors_and_never_something_else(base, any_model, capsys):
    with pytest.raises(SystemExit):
        settings("--kv-dtype=int4", "--executor=cuda")
    assert "--kv-dtype int4 is for --executor cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        settings("--sparse-attention=0.1", "--executor=reference")
    assert "--sparse-attention is for --executor cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        settings("--sparse-attention=1.5")
    assert "--sparse-attention 1.5 is outside 0..1" in capsys.readouterr().err
    odd = replace(base, spec=replace(base.spec, head_dim=48))
    with pytest.raises(ExecutorUnavailable, match="groups of 64 or 32 numbers of a head, and head_dim is 48"):
        make_executor(settings("--kv-dtype=int4"), odd)


def test_who_asks_for_the_cpu_executor_by_name_is_told_why_there_is_none(base, no_library, any_model):
    with pytest.raises(ExecutorUnavailable, match="--executor cpu: no compiler"):
        make_executor(settings("--executor=cpu"), base)


def test_pages_that_the_kernels_cannot_lay_out_are_refused_by_name_or_served_by_the_reference(base, caplog):
    with pytest.raises(ExecutorUnavailable, match="a page of 24 tokens is no multiple of 16"):
        make_executor(replace(settings("--executor=cpu"), page_tokens=24), base)
    with caplog.at_level(logging.WARNING, "weft_runner.executors"):
        executor = make_executor(replace(settings(), page_tokens=24), base)
    assert executor.numerics_class.startswith("reference/")
    assert "a page of 24 tokens" in caplog.records[0].__dict__["kv"]["reason"]


def test_a_model_whose_sizes_do_not_fit_is_served_by_the_reference(base, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "unsupported_reason", odd_heads)
    with caplog.at_level(logging.WARNING, "weft_runner.executors"):
        assert make_executor(settings(), base).numerics_class.startswith("reference/")
    assert caplog.records[0].__dict__["kv"]["reason"] == "head_dim 7 is odd"
    with pytest.raises(ExecutorUnavailable, match="head_dim 7 is odd"):
        make_executor(settings("--executor=cpu"), base)

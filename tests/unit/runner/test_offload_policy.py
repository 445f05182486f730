"""An offload pool's runner at its start: what it measures and keeps, and the policy that it finds and uses."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.native_models import make_step, write_model
from harness.ranks import settings_of as runner_settings
from tests.unit.operator.planning import pool_object
from weft_cli.plan_offload import searches_of
from weft_kernels.cpu import SOURCES, load
from weft_operator.core import make_runner_config, parse_pool
from weft_runner.errors import NoPolicyFits
from weft_runner.executors import ModelSource, cpu, cuda, make_executor
from weft_runner.model import read_spec
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.cuda.device import Gpu
from weft_runner.model.tiers.kept_rates import kept_rates, rates_identity
from weft_runner.offload import (
    BlockWork,
    Budgets,
    Formats,
    MachineRates,
    PolicySearch,
    Sequences,
    serving_limits,
    solve_ranks,
)
from weft_runner.parallel import PipelineParallelExecutor
from weft_runner.settings import (
    KV_PAGES,
    MAX_BATCH_TOKENS,
    MAX_SEQUENCES,
    OffloadByHand,
    RunnerSettings,
    parse_settings,
)
from weft_runner.shell import offload_policy
from weft_runner.shell.offload_policy import measured_machine, settle_offload

MIB = 1 << 20
BASE = "sha256:" + "5" * 64
RATES = MachineRates(1e9, 5e8, 1e10, 1e10, 2e10, 1e10, 1e10, 1e11, {"bf16": ((1, 1e-10), (16, 3e-10))})
SHAPE = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model, and a disk for all tests: the first one measures."""
    root = tmp_path_factory.mktemp("offload")
    write_model(root / "model", 7, **SHAPE)
    return root


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in (folder / "model").iterdir()}


def settings_of(folder: Path, device_mib: int, **flags: Any) -> RunnerSettings:
    own = {"base_digest": BASE, "data_dir": folder / "data", "executor": "auto", "max_rank": 16, **flags}
    limits = {name: own.pop(name, 0) for name in ("kv_pages", "max_sequences", "max_batch_tokens")}
    return runner_settings(**own, **limits, offload=f"device={device_mib * MIB},path={folder / 'disk'}")


def at(settings: RunnerSettings, path: Path) -> RunnerSettings:
    return replace(settings, offload=replace(settings.offload, path=path))


def said(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [record.kv for record in caplog.records if record.message == message]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_mib", "flags"),
    [
        (14, {}),
        (20, {"dtype": "int4", "kv_dtype": "int4"}),
        pytest.param(20, {"dtype": "int8"}, marks=pytest.mark.long),
        pytest.param(40, {"dtype": "fp32", "max_rank": 64}, marks=pytest.mark.long),
        (64, {"max_sequences": 3, "max_batch_tokens": 64, "kv_pages": 100}),
    ],
)
def test_limits_that_are_unset_are_the_policys_and_the_executor_starts_with_them(
    folder: Path, caplog: pytest.LogCaptureFixture, device_mib: int, flags: dict[str, Any]
) -> None:
    """Limits that are set are kept, or are the most."""
    caplog.set_level("INFO")
    asked, spec = settings_of(folder, device_mib, **flags), read_spec(files_of(folder)["config.json"])
    settings, policy = settle_offload(asked, spec, threads=1)
    assert policy is not None
    (line,) = said(caplog, "the policy of offloading")
    assert (line["block"], line["kv_pages"]) == (settings.max_sequences, settings.kv_pages)
    assert min(line["token_ms"], line["one_request_token_ms"], line["tokens_per_s"]) > 0.0
    assert settings.max_batch_tokens >= settings.max_sequences >= 1
    if flags.get("max_sequences"):
        assert settings.max_sequences <= 3
        assert (settings.max_batch_tokens, settings.kv_pages) == (64, 100)
    executor = make_executor(settings, ModelSource(spec, files_of(folder), 1, policy=policy))
    assert isinstance(executor, OffloadExecutor)
    try:
        plan = policy.plans[0]
        assert executor.residency.resident_bytes == plan.usage["device"].weights  # type: ignore[index]
        executor.run(make_step([([1, 2, 3], 0, [0], None)]))
        figures = executor.figures.accuracy
        assert figures is not None
        assert figures.passes == 1
        assert 0.0 < figures.alone_s <= 1.01 * plan.predicted.token_1_s  # which has KV and an adapter
    finally:
        executor.close()


def test_a_restart_does_not_measure_again(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement here is of another machine; another base is measured."""
    caplog.set_level("INFO")
    asked, spec = settings_of(folder, 14), read_spec(files_of(folder)["config.json"])
    asked = at(asked, folder / "restart")
    (folder / "restart").mkdir()
    disks = itertools.count(1e9, 1e8)

    def measured(*_: Any) -> MachineRates:
        return replace(RATES, disk_read=next(disks))

    monkeypatch.setattr(cpu, "measure_rates", measured)
    found = [measured_machine(asked, spec, threads=1) for _ in range(2)]
    assert found[0] == found[1]
    assert said(caplog, "the machine was measured before")
    caplog.clear()
    other = measured_machine(replace(asked, base_digest="sha256:" + "6" * 64), spec, threads=1)
    assert other.disk_read > found[0].disk_read
    assert said(caplog, "the machine is measured")


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "kept"), [(0.0, False), (1.05e10, False), (2e10, True)])
def test_sparse_attention_is_off_where_it_was_measured_not_to_pay(
    folder: Path, caplog: pytest.LogCaptureFixture, rate: float, *, kept: bool
) -> None:
    asked, spec = settings_of(folder, 20, sparse_attention=0.1), read_spec(files_of(folder)["config.json"])
    asked = at(asked, folder / f"sparse-{rate:g}")
    measured = replace(RATES, sparse_attention=rate)
    identity = rates_identity(f"{load().level} {SOURCES.digest()}", BASE, Formats(), 1)
    assert asked.offload.path is not None
    asked.offload.path.mkdir()
    kept_rates(asked.offload.path, identity, lambda: measured)
    settings, policy = settle_offload(asked, spec, threads=1)
    assert policy is not None
    assert settings.sparse_attention == (0.1 if kept else 0.0)
    assert policy.plans[0].formats.sparse_attention is kept
    assert bool(said(caplog, "sparse attention is off: it is not a tenth faster here")) is not kept


@pytest.mark.slow
def test_a_budget_that_no_policy_fits_is_refused_with_what_is_missing(folder: Path) -> None:
    spec = read_spec(files_of(folder)["config.json"])
    with pytest.raises(NoPolicyFits, match=r"the device has \d+ bytes, \d+ too few") as caught:
        settle_offload(settings_of(folder, 3), spec, threads=1)
    assert caught.value.short_bytes > 0


def test_without_a_solver_as_many_weights_stay_as_fit_and_a_warning_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_policy, "SOLVE_S", 0.001)
    spec = read_spec(files_of(folder)["config.json"])
    settings, policy = settle_offload(settings_of(folder, 14, max_sequences=5), spec, threads=1)
    assert policy is not None
    assert not policy.plans
    assert (settings.kv_pages, settings.max_sequences, settings.max_batch_tokens) == (KV_PAGES, 5, MAX_BATCH_TOKENS)
    assert MAX_SEQUENCES > 5
    (warning,) = said(caplog, "no policy was found: as many weights stay as fit")
    assert "within 0.001 s" in str(warning["reason"])


@pytest.mark.slow
def test_each_stage_of_a_pipeline_has_a_plan_for_its_layers(folder: Path) -> None:
    spec = read_spec(files_of(folder)["config.json"])
    settings, policy = settle_offload(settings_of(folder, 14, pipeline_parallel=2), spec, threads=1)
    assert policy is not None
    blocks = [plan.policy.block for plan in policy.plans.values()]
    assert blocks[0] == blocks[1]
    assert settings.max_sequences == blocks[0]  # they take turns: one block is in flight
    executor = make_executor(settings, ModelSource(spec, files_of(folder), 1, policy=policy))
    assert isinstance(executor, PipelineParallelExecutor)
    executor.close()


@pytest.mark.slow
def test_each_host_of_a_pipeline_has_a_plan_by_what_it_measured(folder: Path) -> None:
    """The second one has a disk of a tenth of the rate: it takes longer for its layers, and its stage expects that."""
    spec = read_spec(files_of(folder)["config.json"])
    here = {"pipeline_parallel": 2, "host": "0/2", "leader": "127.0.0.1:5"}
    asked = settings_of(folder, 12, **here)
    own = measured_machine(asked, spec, threads=1)
    slow = replace(own, disk_read=own.disk_read / 10, disk_write=own.disk_write / 10)
    _, policy = settle_offload(asked, spec, 1, lambda: [slow])
    assert policy is not None
    assert policy.machines == {0: own, 1: slow}
    _, alike = settle_offload(asked, spec, 1, lambda: [own])
    assert alike is not None
    one, other = (found.plans[1].predicted.token_1_s for found in (alike, policy))
    assert other > one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "sparse", "executor", "hosts"),
    [
        ({"hostBytes": "9Mi"}, "Off", "cuda", 1),
        ({"hostBytes": "9Mi"}, "Off", "cuda", 2),
        ({}, "Off", "cpu", 1),
        ({"kv": "int4"}, "TopK", "cpu", 2),
    ],
)
def test_the_plans_of_weft_plan_offload_are_those_that_a_runner_of_the_pool_finds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], sparse: str, executor: str, hosts: int
) -> None:
    """The manifest alone decides: the runner has the operator's flags. A GPU's rates are made up, and so is the GPU."""
    gpu = executor == "cuda"
    stages = hosts if gpu else 2
    budgets = {"deviceBytes": "24Mi", "diskPath": str(folder), "weights": "bf16", "kv": "bf16"}
    pool = pool_object(
        memory={"offload": budgets | asked},
        advanced={"maxSequences": 8, "sparseAttention": sparse},
        parallelism={"tensor": 1, "pipeline": stages, "podsPerRunner": hosts},
        template={"resources": {"limits": {"nvidia.com/gpu": 1}}} if gpu else {},
    )  # fmt: skip
    pool["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": "1"}
    pool["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    del pool["spec"]["advanced"]["maxBatchTokens"], pool["spec"]["advanced"]["kvPages"]
    rates = replace(RATES, sparse_attention=2e10, one_memory=not gpu)
    monkeypatch.setattr(cuda, "find_gpu", lambda _index=0: Gpu(torch.device("cpu")))
    monkeypatch.setattr(offload_policy, "measured_machine", lambda *_: rates)
    addresses = {"listen": "h:1", "probes": "h:2", "supervisor": "h:3", "depot": "http://h:4", "data-dir": folder}
    several = {"host": f"0/{hosts}", "leader": "h:5"} if hosts > 1 else {}
    flags = addresses | dict(make_runner_config(parse_pool(pool), BASE).flags) | several | {"executor": executor}
    runner = parse_settings([f"--{name}={value}" for name, value in flags.items()])
    files = files_of(folder)
    _, policy = settle_offload(runner, read_spec(files["config.json"]), 1, lambda: [rates] * (hosts - 1))
    assert policy is not None
    searches = searches_of(pool, str(files["config.json"]), rates, Sequences())
    assert solve_ranks(searches) == policy.plans
    assert {plan.formats.executor for plan in policy.plans.values()} == {executor}
    assert len(policy.plans) == stages


def test_ranks_that_chose_other_parts_of_prompts_compute_the_smallest_of_them(folder: Path) -> None:
    spec = read_spec(files_of(folder)["config.json"])
    work = BlockWork(64, 16, in_flight=2)
    search = PolicySearch(spec, RATES, Budgets(1 << 30), Formats(), work, most_block=8)
    (plan,) = solve_ranks({0: search}).values()
    few, many = (replace(plan, policy=replace(plan.policy, block=8, batch=8), prompt_passes=n) for n in (2, 4))
    for pair in ((few, many), (many, few)):
        limits = serving_limits({rank: (search, one) for rank, one in enumerate(pair)})
        assert (limits.sequences, limits.batch_tokens) == (16, 128 + 16)


def test_who_does_not_ask_for_a_policy_gets_none(folder: Path) -> None:
    asked = replace(settings_of(folder, 14), by_hand=OffloadByHand(), kv_pages=8, max_sequences=2)
    assert settle_offload(asked, read_spec(files_of(folder)["config.json"]), threads=1) == (asked, None)

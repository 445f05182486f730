"""`weft plan offload` from the command line to the report."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft_cli.main import main
from weft_cli.offload_report import report
from weft_cli.plan_offload import Change, read_rates, searches_of
from weft_runner.offload import (
    MachineRates,
    MemoryTier,
    PipelineTime,
    PolicySearch,
    Sequences,
    pipeline_time,
    plan_of,
    rising,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PRODUCTS = {"bf16": rising({1: 1e-10, 16: 1.2e-10, 256: 1.1e-9}), "int4": rising({1: 5e-11, 256: 1.2e-9})}
GPUS = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
RATES = MachineRates(1e9, 5e8, 1e10, 8e9, 2e10, 1e10, 5e9, 1e11, PRODUCTS)
ON_GPU = replace(RATES, one_memory=False)
POOL = """apiVersion: serving.weft.dev/v1alpha1
kind: ServingPool
metadata: {name: mine, namespace: acme}
spec:
  model: {uri: "file:%s"}
  memory: {offload: {deviceBytes: %s, diskPath: %s}}
  advanced: {maxSequences: 4}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model's config.json, its pool of 30 MiB, and a machine."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "machine.json").write_text(json.dumps(asdict(RATES)))
    pool(tmp_path, "30Mi")
    return tmp_path


def pool(folder: Path, device: str) -> None:
    (folder / "pool.yaml").write_text(POOL % (folder, device, folder))


def change(folder: Path, offload: dict[str, Any] | None = None, **parts: dict[str, Any]) -> None:
    """More of the pool's spec."""
    manifest = yaml.safe_load((folder / "pool.yaml").read_text())
    manifest["spec"]["memory"]["offload"] |= offload or {}
    for name, values in parts.items():
        manifest["spec"][name] = {**manifest["spec"].get(name, {}), **values}
    (folder / "pool.yaml").write_text(yaml.safe_dump(manifest))


def run(files: Path, *more: str) -> int:
    load = ("--prompt", "64", "--output", "16", "--adapters", "4")
    return main(["plan", "offload", "-f", str(files / "pool.yaml"), *load, *more])


def searched(files: Path, rates: MachineRates = RATES) -> dict[int, PolicySearch]:
    """What `run` asks for."""
    manifest = yaml.safe_load((files / "pool.yaml").read_text())
    return searches_of(manifest, None, rates, Sequences(64, 16, 4, 16))


def test_the_policy_its_parts_the_bound_and_what_would_help(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--machine", str(files / "machine.json"), "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    plan = plan_of(answer["plan"])
    assert plan.predicted.block_s >= plan.relaxed_s
    assert answer["pool"]["maxSequences"] == plan.policy.block
    gains = [one["tokens_per_s"] for one in answer["helps"]]
    assert gains == sorted(gains, reverse=True)
    text = "\n".join(report(searched(files), {0: plan}, [Change(*one.values()) for one in answer["helps"]]))
    assert "35.7 MiB of weights (bf16), 30.0 MiB of device memory" in text
    for part in (
        "SHARES",
        "RING",
        "disk read",
        "█",
        "the linear program's bound",
        "one request alone",
        "maxBatchTokens",
        "int4 weights",
    ):
        assert part in text
    assert f"{plan.predicted.tokens_per_s:.3g} tokens/s" in text


def test_a_budget_that_holds_nothing_says_what_would(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool(files, "1Mi")
    assert run(files, "--machine", str(files / "machine.json")) == 1
    printed = capsys.readouterr().err
    assert "no policy fits: the device has 1048576 bytes" in printed
    assert "What would fit: deviceBytes" in printed


@pytest.mark.slow
def test_a_pool_whose_template_asks_for_a_gpu_is_planned_as_the_cuda_executor_places(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KV is on the GPU or its host, activations on the GPU; and copies are a part of a pass."""
    change(files, offload={"hostBytes": "20Mi"}, template=GPUS)
    (files / "machine.json").write_text(json.dumps(asdict(ON_GPU)))
    assert run(files, "--machine", str(files / "machine.json"), "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    plan = plan_of(answer["plan"])
    assert (plan.formats.executor, plan.policy.kv.disk, plan.policy.activations.device) == ("cuda", 0.0, 1.0)
    assert plan.usage[MemoryTier.HOST].weights > 0
    assert plan.predicted.token.to_device_s > 0.0
    helping = [Change(*one.values()) for one in answer["helps"]]
    assert {"half as much host memory more", "copies twice as fast"} < {one.subject for one in helping}
    text = "\n".join(report(searched(files, ON_GPU), {0: plan}, helping))
    assert "host to device" in text


@pytest.mark.slow
def test_a_pipeline_prints_each_stages_policy_and_what_all_of_them_take(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(files, offload={"deviceBytes": "16Mi"}, parallelism={"pipeline": 2})
    assert run(files, "--machine", str(files / "machine.json"), "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    plans = {int(stage): plan_of(plan) for stage, plan in answer["plans"].items()}
    together = PipelineTime(**answer["pipeline"])
    assert together == pipeline_time([plans[0], plans[1]], hosts=1)
    assert answer["pool"]["maxSequences"] == plans[0].policy.block == plans[1].policy.block
    lines = report(searched(files), plans, [Change(*one.values()) for one in answer["helps"]])
    table = lines[lines.index(next(line for line in lines if line.startswith("STAGE   LAYERS"))) :]
    assert [row.split()[:2] for row in table[1:3]] == [["0", "0-2"], ["1", "3-5"]]
    for row, plan in zip(table[1:3], plans.values(), strict=True):
        assert f"{plan.policy.weights.device:.0%} 0% {plan.policy.weights.disk:.0%}" in row
    text = "\n".join(lines)
    assert f"{together.tokens_per_s:.3g} tokens/s" in text
    assert f"({together.bound_s / together.block_s:.0%} reached)" in text


def test_more_stages_than_layers_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(files, parallelism={"pipeline": 7})
    assert run(files, "--machine", str(files / "machine.json")) == 2
    assert "ask for at most 6 stages" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", [True, False])
def test_rates_of_another_kind_of_machine_are_refused(
    files: Path, capsys: pytest.CaptureFixture[str], *, gpu: bool
) -> None:
    """int8 weights, which only the cpu executor has, are computed on CPUs whatever the template asks for."""
    change(files, template=GPUS, **({} if gpu else {"offload": {"weights": "int8"}}))
    rates = RATES if gpu else replace(ON_GPU, products={"int8": PRODUCTS["bf16"]})
    (files / "machine.json").write_text(json.dumps(asdict(rates)))
    assert run(files, "--machine", str(files / "machine.json")) == 2
    ours, theirs = ("CPUs", "a GPU") if gpu else ("a GPU", "CPUs")
    assert f"rates are those of {ours}, and the pool's runners compute on {theirs}" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured_at_the_disk_path_and_saved(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = files / "saved.json"
    assert run(files, "--measure", "--save", str(saved)) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert set(read_rates(saved).products) == {"bf16", "int4"}
    assert sorted(path.name for path in files.iterdir()) == ["config.json", "machine.json", "pool.yaml", "saved.json"]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ((), "which machine?"),
        (("--measure", "--machine", "machine.json"), "which machine?"),
        (("--machine", "none.json"), "none.json"),
        (("--machine", "machine.json", "--model", "none"), "no config.json"),
        (("--machine", "machine.json", "-o", "yaml"), "text or json"),
    ],
)
def test_what_is_missing_or_wrong(
    arguments: tuple[str, ...], printed: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [str(files / word) if word.endswith(".json") else word for word in arguments]
    assert run(files, *there) == 2
    assert printed in capsys.readouterr().err


def test_a_pool_that_does_not_offload_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (files / "pool.yaml").read_text()
    (files / "pool.yaml").write_text(text.replace("memory:", "#"))
    assert run(files, "--machine", str(files / "machine.json")) == 2
    assert "does not offload" in capsys.readouterr().err

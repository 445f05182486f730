"""`weft plan offload` from the command line to the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from weft_cli.main import main
from weft_cli.plan_offload import Change, find, read_rates, report, search_of
from weft_runner.offload.costs import BlockWork
from weft_runner.offload.machine import MachineRates, machine_json, rising
from weft_runner.offload.plan import plan_of
from weft_runner.offload.search import PolicySearch

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PRODUCTS = {"bf16": rising({1: 1e-10, 16: 1.2e-10, 256: 1.1e-9}), "int4": rising({1: 5e-11, 256: 1.2e-9})}
RATES = MachineRates(1e9, 5e8, 1e10, 8e9, 2e10, 1e10, 5e9, 1e11, PRODUCTS)
POOL = """apiVersion: serving.weft.dev/v1alpha1
kind: ServingPool
metadata: {name: mine, namespace: acme}
spec:
  model: {uri: "file:%s"}
  offload: {mode: Auto, deviceBytes: %s, diskPath: %s}
  scheduler: {maxSequences: 4}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model's config.json, its pool of 30 MiB, and a machine."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "machine.json").write_text(json.dumps(machine_json(RATES)))
    pool(tmp_path, "30Mi")
    return tmp_path


def pool(folder: Path, device: str) -> None:
    (folder / "pool.yaml").write_text(POOL % (folder, device, folder))


def run(files: Path, *more: str) -> int:
    load = ("--prompt", "64", "--output", "16", "--adapters", "4")
    return main(["plan", "offload", "-f", str(files / "pool.yaml"), *load, *more])


def searched(files: Path, rates: MachineRates = RATES) -> PolicySearch:
    """What `run` asks for."""
    manifest = yaml.safe_load((files / "pool.yaml").read_text())
    return search_of(manifest, None, rates, BlockWork(64, 16, adapters=4, adapter_rank=16))


def test_the_policy_its_parts_the_bound_and_what_would_help(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--machine", str(files / "machine.json"), "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    plan = plan_of(answer["plan"])
    assert plan.predicted.block_s >= plan.relaxed_s
    assert answer["pool"]["scheduler"]["maxSequences"] == plan.policy.block
    gains = [one["tokens_per_s"] for one in answer["helps"]]
    assert gains == sorted(gains, reverse=True)
    text = "\n".join(report(searched(files), plan, [Change(**one) for one in answer["helps"]]))
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


@pytest.mark.parametrize(
    ("rate", "printed"),
    [(0.0, "off: it was not measured"), (8e9, "off: it takes 1.25 times as long"), (2e10, "")],
)
def test_sparse_attention_that_does_not_pay_is_off(rate: float, printed: str, files: Path) -> None:
    asked = POOL.replace("mode: Auto", "mode: Auto, sparseAttention: TopK") % (files, "30Mi", files)
    (files / "pool.yaml").write_text(asked)
    search = searched(files, replace(RATES, sparse_attention=rate))
    text = "\n".join(report(search, find(search), []))
    assert (f"sparse attention is {printed}" in text) if printed else ("sparse attention" not in text)


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
    (files / "pool.yaml").write_text(text.replace("mode: Auto", "mode: 'Off'"))
    assert run(files, "--machine", str(files / "machine.json")) == 2
    assert "does not offload" in capsys.readouterr().err

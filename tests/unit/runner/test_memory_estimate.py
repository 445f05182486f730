"""What serving takes of memory, computed before anything is loaded; what the machine and its control groups have."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harness.native_library import native_library
from harness.ranks import settings_of
from weft.domain.model.config import parse_spec
from weft.domain.model.packed import packed_bytes
from weft.domain.model.spec import LayerSpec, ModelSpec
from weft.domain.model.tensors import model_tensors
from weft_kernels.cpu import KINDS as NATIVE
from weft_runner.errors import OutOfMemory
from weft_runner.executors import ModelSource, make_executor
from weft_runner.memory_estimate import (
    MemoryLimit,
    available_memory,
    check_memory,
    device_workspace,
    estimate_memory,
    page_bytes,
)
from weft_runner.model.cuda.cuda_graphs import decode_sizes, graph_rows, prompt_sizes
from weft_runner.model.cuda.step import DeviceStep, decode_shape, prompt_shape

GIB = 1 << 30
KINDS = ("bf16", "fp32", "int8", "int4", "reference")
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def needed(config: dict[str, Any], kind: str, **change: Any):
    return estimate_memory(parse_spec(config), kind, **{"kv_pages": 1024, "page_tokens": 16, **change})


def parameters(spec: ModelSpec) -> int:
    return sum(math.prod(shape) for _, shape in model_tensors(spec))


def test_a_large_model_takes_what_its_parameters_and_pages_take():
    """8.03 billion parameters; sizes that need no padding."""
    spec = parse_spec(LLAMA_8B)
    embedding, norms = 128_256 * 4096, (2 * 32 + 1) * 4096
    matrices = parameters(spec) - embedding - norms  # the embedding stays in the file
    whole = {kind: needed(LLAMA_8B, kind) for kind in KINDS}
    assert [whole[kind].kv_pages / GIB for kind in KINDS] == [2.0, 4.0, 2.0, 2.0, 4.0]
    base = {kind: part.total - part.kv_pages for kind, part in whole.items()}
    assert base["bf16"] == 2 * matrices + 4 * norms
    assert base["fp32"] == 4 * matrices + 4 * norms
    assert base["reference"] == 4 * parameters(spec)
    assert base["int8"] == pytest.approx(matrices, rel=0.01)
    assert base["int4"] == matrices * 9 // 16 + 4 * norms


def test_a_tied_head_is_counted_once_and_a_converted_embedding_beside_it():
    tied = LLAMA_8B | {"tie_word_embeddings": True}
    embedding = 128_256 * 4096
    assert needed(LLAMA_8B, "bf16").embedding == needed(tied, "bf16").embedding
    assert needed(LLAMA_8B, "reference").embedding - needed(tied, "reference").embedding == 4 * embedding
    half = tied | {"dtype": "float16"}
    assert needed(half, "bf16").embedding - needed(tied, "bf16").embedding == 4 * embedding
    assert needed(half, "reference") == needed(tied, "reference")


@pytest.mark.parametrize("kind", KINDS)
def test_biases_and_head_norms_are_counted(kind):
    plain = needed(LLAMA_8B | {"head_dim": 128, "num_key_value_heads": 8}, kind)
    biased = needed(LLAMA_8B | {"architectures": ["Qwen2ForCausalLM"]}, kind)
    normed = needed(LLAMA_8B | {"architectures": ["Qwen3ForCausalLM"]}, kind)
    assert biased.layers - plain.layers == 32 * 4 * (4096 + 2 * 1024)
    assert normed.layers - plain.layers == 32 * 4 * 2 * 128


def test_native_packing_takes_as_many_bytes_as_are_counted():
    library = native_library()
    for kind, number in NATIVE.items():
        for n_out, n_in in ((16, 32), (17, 33), (96, 48), (1, 1), (203, 100)):
            scales = -(-n_out // 16) * 16 * 4 if kind == "int8" else 0
            assert packed_bytes(n_out, n_in, kind) == library.packed_bytes(number, n_out, n_in) + scales


def test_too_little_memory_is_refused_with_the_numbers():
    want = replace(needed(LLAMA_8B, "bf16", workspace_bytes=GIB // 4), requests=GIB // 32)
    check_memory(want, MemoryLimit(want.total, "this machine"))
    with pytest.raises(OutOfMemory) as caught:
        check_memory(want, MemoryLimit(want.total - 1, "this container (limit 8.00 GiB)"))
    message = str(caught.value)
    numbers = [float(number) for number in re.findall(r"([\d.]+) GiB", message)]
    assert numbers[0] == pytest.approx(sum(numbers[1:6]), abs=0.03), message
    assert numbers[3:] == [2.0, 0.25, 0.03, 8.0, numbers[0]], message
    for word in ("layers", "embedding and head", "KV pages", "workspace", "requests", "this container"):
        assert word in message


def test_a_page_holds_keys_and_values_of_every_layer():
    spec = parse_spec(LLAMA_8B)
    assert page_bytes(spec, "bf16", 16) == 32 * 2 * 8 * 16 * 128 * 2
    assert page_bytes(spec, "fp32", 32) == 4 * page_bytes(spec, "bf16", 16)
    assert page_bytes(spec, "bf16", 16, int4_kv=True) == 32 * 2 * 8 * 16 * (128 // 2 + 2 * 4)
    heads_of_96 = replace(spec, head_dim=96)
    assert page_bytes(heads_of_96, "int4", 16, int4_kv=True) == 32 * 2 * 8 * 16 * (96 // 2 + 3 * 4)
    whole, packed = (estimate_memory(spec, "int8", kv_pages=64, page_tokens=16, int4_kv=int4) for int4 in (False, True))
    assert 64 * packed.kv_pages == 18 * whole.kv_pages
    assert replace(packed, kv_pages=0) == replace(whole, kv_pages=0)


@pytest.mark.parametrize("executor", ["auto", "reference"])
def test_a_runner_that_cannot_hold_its_model_says_so_before_it_opens_a_file(executor):
    spec = replace(parse_spec(LLAMA_8B), by_layer=(LayerSpec(),) * (1 << 20))
    settings = settings_of(executor=executor)
    with pytest.raises(OutOfMemory, match="GiB") as caught:
        make_executor(settings, ModelSource(spec, {}, threads=1, stopping=lambda: False))
    assert float(re.findall(r"([\d.]+) GiB", str(caught.value))[0]) > 100_000


# ---- what there is


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def machine() -> int:
    return psutil.virtual_memory().total


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("0::/kubepods/pod1/c1\n")
    return path


def test_without_limits_it_is_the_machines(tmp_path, proc):
    for found in (available_memory(tmp_path / "none", tmp_path), available_memory(proc, tmp_path / "none")):
        assert found.limit == "this machine"
        assert 0 < found.n_bytes < machine()


def test_a_container_has_its_limit_less_what_it_uses_but_for_file_pages(tmp_path, proc):
    root = tmp_path / "fs"
    stat = "anon 70\nactive_file 10\ninactive_file 15\nshmem 3\n"
    write_group(root / "kubepods" / "pod1" / "c1", memory__max="200\n", memory__current="100\n", memory__stat=stat)
    assert available_memory(proc, root) == MemoryLimit(
        200 - 100 + 25, "this container (limit 0.00 GiB)", 200, is_group=True
    )


def test_the_tightest_group_above_counts(tmp_path, proc):
    root = tmp_path / "fs"
    write_group(root / "kubepods" / "pod1" / "c1", memory__max="max\n", memory__current="100\n")
    write_group(root / "kubepods" / "pod1", memory__max="300\n", memory__current="100\n")
    write_group(root / "kubepods", memory__max="400\n", memory__current="150\n")
    write_group(root, memory__stat="active_file 1\n")
    assert available_memory(proc, root).n_bytes == 200


def test_a_group_that_is_mounted_as_the_root_is_found(tmp_path, proc):
    """In a container with a control-group namespace the path in /proc may be the host's."""
    write_group(tmp_path / "fs", memory__max="50\n", memory__current="20\n")
    assert available_memory(proc, tmp_path / "fs").n_bytes == 30


def test_the_first_generation_of_control_groups_is_read(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("9:name=systemd:/\n4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n")
    stat = "active_file 1\ntotal_active_file 10\ntotal_inactive_file 5\n"
    files = {"memory__limit_in_bytes": "100\n", "memory__usage_in_bytes": "60\n", "memory__stat": stat}
    write_group(root / "memory" / "docker" / "a", **files)
    write_group(root / "memory", memory__limit_in_bytes=f"{(1 << 63) - 4096}\n", memory__usage_in_bytes="9\n")
    assert available_memory(proc, root).n_bytes == 55


def test_a_group_above_its_limit_has_nothing_left(tmp_path, proc):
    write_group(tmp_path / "fs", memory__max="50\n", memory__current="70\n")
    assert available_memory(proc, tmp_path / "fs").n_bytes == 0


def test_this_machine_can_be_asked():
    assert 0 < available_memory().n_bytes < machine()


def test_each_recorded_step_has_page_tables_of_its_own():
    """256 rows of 8,192 tokens in pages of 16: 512 pages a row, for 35 + 16 recorded sizes and for eager steps."""
    spec = parse_spec(LLAMA_8B)
    given = {"rows": 256, "tokens": 512, "context": 8192, "page_tokens": 16}
    recorded = graph_rows(256, 512)
    without, with_graphs = (device_workspace(spec, "cuda bf16", **given, recorded=of) for of in ((), recorded))
    shapes = [decode_shape(rows, 512, 16) for rows in decode_sizes(256)]
    shapes += [prompt_shape(tokens, 256, 512, 16, 32) for tokens in prompt_sizes(512)]
    steps = [DeviceStep(shape, torch.device("cpu")) for shape in shapes]
    assert with_graphs - without == sum(step.pages.nbytes for step in steps) == 4 * 512 * sum(recorded)
    assert without > 4 * 512 * 256 + 2 * 4 * 256 * 128_256


def test_a_gpu_that_has_no_room_for_what_steps_work_on_is_told_with_the_flags_that_help(small_config, monkeypatch):
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("weft_runner.executors.cuda.load_weights", lambda *_, **__: None)
    monkeypatch.setattr("weft_runner.model.cuda.executor.CudaExecutor", full)
    spec = parse_spec({**small_config, "hidden_size": 64, "intermediate_size": 96})
    settings = settings_of(executor="cuda", page_tokens=16, kv_pages=77, max_rank=16)
    with pytest.raises(OutOfMemory, match=r"fewer --kv-pages \(77\), --max-sequences .* CUDA out of memory"):
        make_executor(settings, ModelSource(spec, {}, 1, lambda: False))

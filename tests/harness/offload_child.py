"""A process that serves an offloaded model, for tests of what it takes and of what its end leaves. Prints JSON.

    python -m harness.offload_child MODEL FOLDER DEVICE_BYTES KV_DISK_PAGES [GROUP]

Its sequences lie on the last eight pages: on the disk, where at least as many are there.
`GROUP`: a memory control group (v1) that it enters before it loads, so that the kernel accounts what loading takes.
"""

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness.native_models import make_step, offload_executor
from weft_kernels.cpu import load

MODEL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 32, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 2048,
}  # fmt: skip
STEPS, FRAMES = 3, 8


def main(model: Path, folder: Path, device_bytes: int, kv_disk_pages: int, group: Path | None = None) -> None:
    load()  # what it takes is no part of the budget
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    before = anonymous_bytes()
    files = {path.name: path for path in model.iterdir()}
    sizes = {"dtype": "bf16", "threads": 1, "pages": FRAMES + kv_disk_pages, "page_tokens": 16, "slots": 1}
    limits = {"micro_batch": 64, "max_tokens": 128, "max_sequences": 8, "max_rank": 8, "kv_disk_pages": kv_disk_pages}
    executor = offload_executor(files, folder, sizes, device_bytes=device_bytes, **limits)
    sums, pages = [], range(kv_disk_pages, kv_disk_pages + FRAMES)
    executor.run(make_step([(list(range(12)), 0, pages[7:], None)]))
    for step in range(STEPS):
        logits = executor.run(make_step([(list(range(100)), 0, pages[:7], None), ([step], 12 + step, pages[7:], None)]))
        sums.append(float(logits.sum(dtype=np.float64)))
    figures = executor.figures
    (packed,) = folder.glob("*.packed")
    print(
        json.dumps({
            "taken": anonymous_bytes() - before, "cached": cached_bytes(packed), "sums": sums,
            "weights": figures.resident_bytes + figures.streamed_bytes, "read": figures.stream.read_bytes,
            "streamed": figures.streamed_bytes, "kv": [figures.kv.read_bytes, figures.kv.written_bytes],
        })
    )  # fmt: skip


def anonymous_bytes() -> int:
    """Count the bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def cached_bytes(path: Path) -> int:
    """Count the bytes of a file in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found, view = (ctypes.c_ubyte * pages)(), (ctypes.c_char * len(mapped)).from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(mapped)), found)
        del view
        assert code == 0, os.strerror(ctypes.get_errno())
        return sum(one & 1 for one in found) * mmap.PAGESIZE


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *map(Path, sys.argv[5:]))

"""`weft bench offload`: a model larger than its memory, whose weights come from disk while layers compute (FlexGen).

`cells`: shares of the weights in memory, beside what disk and arithmetic allow. `peers`: Weft, accelerate and
llama.cpp, each alone in a memory group of the same limit. docs/benchmarks/offload.md has the method.
"""

import hashlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench import cases
from weft_bench.cpu_machine import GIGA, Machine, meter
from weft_bench.cpu_shapes import BASE, DISTINCT, RANK, SHAPES, distinct, prompts
from weft_bench.drive.engine import PAGE_TOKENS, WEIGHT_BYTES, Batch, Offload, Sizes, Subject, adapter_pages
from weft_bench.peers.compare import Load, checked
from weft_bench.peers.engines import GGUF_KINDS, LLAMA, PEERS, gguf_files
from weft_bench.peers.environment import environment
from weft_bench.peers.worker import Worker, command
from weft_bench.roofline import Work, base_bytes, kv_bytes
from weft_bench.run import Run
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.memory_estimate import available_memory
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.tiers import disk_rates
from weft_stage.cpu_models import adapter, base_model, cache_dir, files
from weft_stage.errors import PeerFailed
from weft_stage.lines import Line, Origin
from weft_stage.memory_group import forget, memory_group
from weft_stage.playing import Ask, Played
from weft_stage.shapes import BF16_BYTES

BATCH_TOKENS = 4096  # of a pass
READ_S = 1.5  # of a measurement of the disk
EMBEDDING_BYTES = 1 << 30  # with all weights there is room for the embedding
OURS, ACCELERATE = "weft", "accelerate"
RUNTIME_BYTES = 512 << 20  # Python, torch and transformers before there is any weight: the largest of the three
OWN_BYTES = 384 << 20  # of RUNTIME_BYTES, what Weft takes
ANSWER_S = 900.0
BATCHES = {OURS: (1, 4, 8, 16), ACCELERATE: (1, 4, 8), LLAMA: (1, 8)}
PASS_TOKENS = 2048  # of Weft in a group: larger prompts come in several passes, which take less memory
WARM_TOKENS, WARM_OUTPUT = 16, 2


def figures(options: cases.Offload, run: Run) -> Iterator[Line]:
    """Measure the cases of every shape. Raises EngineRefused, WrongAdapter, NoGroup, PeerFailed."""
    machine = Machine.measured(meter(options.threads or cpu_quota()))
    origin = run.origin("safetensors")
    origin = replace(origin, versions=f"{origin.versions}, seed {options.seed}")
    python = options.wheels_python
    if "peers" in options.cases and python is None:
        python = environment((options.models or cache_dir()).parent, run.progress, list(PEERS[LLAMA].packages.values()))
    for name in options.shapes:
        model = Model(options, name, machine)
        if "cells" in options.cases:
            yield from cell_figures(model, origin, run)
        if python is not None:
            yield from peer_figures(model, origin, run, python)


class Model:
    """One random model on this machine, and the engines that offload it."""

    def __init__(self, options: cases.Offload, name: str, machine: Machine) -> None:
        self.options, self.name, self.shape, self.machine = options, name, SHAPES[name], machine
        self.folder = options.models or cache_dir()
        self.base, self.packed = base_model(self.folder, name, self.shape), self.folder / "offload"
        self.digest = f"sha256:{hashlib.sha256(repr(self.shape).encode()).hexdigest()}"
        self.rng = random.Random(options.seed)
        self.prompt_tokens, self.tokens = (32, 4) if options.quick else (512, 32)

    @property
    def lengths(self) -> str:
        """Return the end of the names of quick cases."""
        return f", {self.prompt_tokens} + {self.tokens} tokens" if self.options.quick else ""

    def target(self, text: str) -> str | None:
        return None if self.options.quick else text

    def adapters(self, batch: Batch) -> list[Path | None]:
        """Return the folder of each row's adapter."""
        numbers = batch.adapters
        return [None if n is None else adapter(self.folder, self.name, self.shape, n, RANK) for n in numbers]

    def subject(self, batch: Batch, device_bytes: int, share: float = 1.0) -> Subject:
        """Return an engine with `device_bytes` of memory, of which weights take at most `share`."""
        adapters = batch.adapters_work(self.shape).n_bytes
        sizes = Sizes(
            executor="cpu", dtype=self.options.dtype, threads=self.options.threads, rows=batch.rows,
            slots=batch.rows, context_tokens=self.prompt_tokens + self.tokens + 1, prefills=batch.rows, max_rank=RANK,
            batch_tokens=min(BATCH_TOKENS, batch.rows * self.prompt_tokens),
            adapter_pages=0 if batch.popularity == BASE else adapter_pages(self.shape, adapters, batch.rows),
            offload=Offload(self.packed, self.digest, device_bytes, share),
        )  # fmt: skip
        return Subject(files(self.base), sizes)

    def needs(self, batch: Batch) -> tuple[int, int]:
        """Return the bytes of the weights, and what an engine needs beside them. Writes the packed file."""
        with self.subject(batch, available_memory().n_bytes // 2, 0.0) as subject:
            executor = offloading(subject)
            return executor.figures.resident_bytes + executor.figures.streamed_bytes, executor.beside_bytes

    def bound_s(self, tokens: int, rows: int, disk_s: float) -> float:
        """Return the bound of a pass: the disk, the arithmetic, or the weights' bytes in memory."""
        shape, weights = self.shape, base_bytes(self.shape, WEIGHT_BYTES[self.options.dtype])
        flops = 2 * (shape.layers * shape.layer_weights * tokens + shape.vocab * shape.hidden * rows)
        return max(disk_s, Work(weights, flops).bound_s(self.machine.rates(weights)))

    def play(self, subject: Subject, batch: Batch, prompt_tokens: int, tokens: int) -> Played:
        paths, made = self.adapters(batch), prompts(self.rng, batch.rows, prompt_tokens, self.shape.vocab)
        subject.adapters.paths.update({str(path): path for path in paths if path})
        return subject.play([Ask(str(path or ""), prompt, tokens) for path, prompt in zip(paths, made, strict=True)])


def offloading(subject: Subject) -> OffloadExecutor:
    executor = subject.built.engine.executor
    assert isinstance(executor, OffloadExecutor)
    return executor


def cell_figures(model: Model, origin: Origin, run: Run) -> Iterator[Line]:
    options = model.options
    for rows, popularity in product(options.rows, options.popularities):
        batch = Batch(rows, popularity)
        weights, beside = model.needs(batch)
        for percent in options.shares:
            device_bytes = beside + percent * weights // 100 + (EMBEDDING_BYTES if percent >= 100 else 0)
            case = f"{model.name} {options.dtype}, {percent}% of the weights, {rows} rows, {popularity}{model.lengths}"
            with run.progress(case, 1) as advance:
                measured = list(_cell(model, origin, case, batch, device_bytes))
                advance(1)
            yield from measured


def _cell(model: Model, origin: Origin, case: str, batch: Batch, device_bytes: int) -> Iterator[Line]:
    packed = model.packed.glob(f"{model.digest.removeprefix('sha256:')}-{model.options.dtype}-*.packed")
    path = max(packed, key=lambda path: path.stat().st_size)
    before = read_rate(path)
    with model.subject(batch, device_bytes) as subject:
        executor = offloading(subject)
        model.play(subject, batch, WARM_TOKENS, WARM_OUTPUT)
        stream = replace(executor.figures.stream)
        played = model.play(subject, batch, model.prompt_tokens, model.tokens)
        streamed_bytes, end = executor.figures.streamed_bytes, replace(executor.figures.stream)
    after = read_rate(path)
    disk = (before + after) / 2
    disk_s = streamed_bytes / disk
    share = sum(model.bound_s(beat.tokens, beat.rows, disk_s) for beat in played.beats) / played.wall_s
    decode = [beat.ended - beat.began for beat in played.beats if not beat.prefills]
    decode_s, bound_s = sum(decode) / max(1, len(decode)), model.bound_s(batch.rows, batch.rows, disk_s)
    rate, line = played.tokens / played.wall_s, origin.line
    yield line(case, "output tokens", rate, "tokens/s", baseline=rate / share, bound_fraction=share)
    yield line(case, "of the bound", share, "", target=model.target(">= 0.8") if streamed_bytes else None)
    fraction = bound_s / decode_s
    yield line(case, "pass without prompts", decode_s * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=fraction)
    yield line(case, "read from disk a pass", streamed_bytes / GIGA, "GB")
    if (reading_s := end.reading_s - stream.reading_s) > 0.0:
        reading = (end.read_bytes - stream.read_bytes) / reading_s
        yield line(case, "disk alone, before", before / GIGA, "GB/s")
        yield line(case, "disk alone, after", after / GIGA, "GB/s")
        fraction = reading / disk
        yield line(
            case, "disk read while computing", reading / GIGA, "GB/s", baseline=disk / GIGA, bound_fraction=fraction
        )
        yield line(case, "time that waits for weights", (end.waited_s - stream.waited_s) / played.wall_s, "")


def read_rate(path: Path) -> float:
    """Return the bytes a second of direct reads as weights are read: as many threads, into as much memory as a ring."""
    memory = disk_rates.written(disk_rates.MEMORY_BYTES)
    stream = disk_rates.DiskStream(path, path.stat().st_size, os.O_RDONLY, memory)
    began = time.perf_counter()
    blocks = sum(stream.blocks(lambda done: done > 0 and time.perf_counter() - began > READ_S))
    return blocks * disk_rates.BLOCK / (time.perf_counter() - began)


def peer_figures(model: Model, origin: Origin, run: Run, python: Path) -> Iterator[Line]:
    options = model.options
    weights, _ = model.needs(Batch(1, options.popularities[0]))
    for percent, popularity in product(options.shares, options.popularities):
        limit, best = percent * weights // 100 + RUNTIME_BYTES, dict[str, float]()
        group = f"{popularity}, a group of {limit >> 20} MiB{model.lengths}"
        case = f"{model.name} {options.dtype}, {percent}% of the weights, {group}"
        for who, batches in BATCHES.items():
            rows_of = (1,) if who == LLAMA and popularity == DISTINCT else batches  # it runs adapters in turn
            peaks = list[int]()
            with run.progress(f"{case}: {who}", len(rows_of)) as advance:
                for rows in rows_of:
                    rate, peak_bytes = _in_group(model, who, Batch(rows, popularity), limit, python, run)
                    peaks.append(peak_bytes)
                    best[who] = max(best.get(who, 0.0), rate or 0.0)
                    yield origin.line(case, f"{who}, {rows} rows", rate, "tokens/s")
                    advance(1)
            yield origin.line(case, f"{who}, most memory", max(peaks) / (1 << 20), "MiB")
        for who in (ACCELERATE, LLAMA):
            ratio = best[OURS] / best[who] if best[OURS] and best[who] else None
            yield origin.line(f"{case}, against {who}", "times as fast", ratio, "x", target=model.target(">= 1"))


def _in_group(model: Model, who: str, batch: Batch, limit: int, python: Path, run: Run) -> tuple[float | None, int]:
    """Return the tokens a second of a whole run, None if the engine does not fit, and its peak of memory."""
    folders = tuple(None if path is None else str(path) for path in model.adapters(batch))
    load, rate = Load(folders, model.prompt_tokens, model.tokens, model.shape.vocab), None
    with TemporaryDirectory(prefix="weft-offload-") as scratch, memory_group(limit) as group:
        words, work = _command(model, who, batch, load, limit, scratch, python)
        try:
            with Worker(who, group.command(words), work, Path(scratch) / "log", answer_s=ANSWER_S) as worker:
                for length, tokens in ((WARM_TOKENS, WARM_OUTPUT), (load.prompt_tokens, load.tokens)):
                    made = prompts(model.rng, batch.rows, length, load.vocab)
                    seconds = checked(who, load, tokens, worker.run(made, tokens))
                rate = load.rows * load.tokens / seconds
        except PeerFailed as error:
            run.say(f"{who}, {batch.name}, {limit >> 20} MiB: {error}")
        return rate, group.peak_bytes


def _command(
    model: Model, who: str, batch: Batch, load: Load, limit: int, scratch: str, python: Path
) -> tuple[list[str], dict[str, object]]:
    """Return the command of an engine in a group of `limit` bytes, and its work. Files are not cached afterwards."""
    shape, dtype, adapters_bytes = model.shape, model.options.dtype, batch.adapters_work(model.shape).n_bytes
    work: dict[str, object] = {
        "base": str(model.base), "adapters": load.adapters, "max_rank": RANK,
        "threads": model.options.threads or cpu_quota(), "context_tokens": load.prompt_tokens + load.tokens + 1,
        "batch_tokens": min(PASS_TOKENS, load.rows * load.prompt_tokens),
    }  # fmt: skip
    match who:
        case "accelerate":  # weights have what the limit leaves beside KV, adapters and two layers on their way
            kv = kv_bytes(shape, load.rows, load.prompt_tokens + load.tokens)
            beside = RUNTIME_BYTES + kv + adapters_bytes + 2 * BF16_BYTES * shape.layer_weights
            forget([model.base / "model.safetensors"])
            weights_bytes = max(0, int(limit - beside))
            work |= {"weights_bytes": weights_bytes, "folder": scratch, "libraries": ("accelerate",)}
            return command(sys.executable, "transformers_worker"), work
        case "llama.cpp":
            folder, kind, peer = model.folder / model.name / "gguf", GGUF_KINDS[dtype], PEERS[LLAMA]
            gguf = gguf_files(python, folder, kind, model.base, load.adapters)
            forget(folder.glob("*.gguf"))
            work |= {"gguf": gguf, "kind": kind, "libraries": peer.libraries}
            return command(python, peer.worker), work
        case _:  # pages of all adapters, a tenth of padding, and of one that comes while another one leaves
            n_bytes = 1.1 * adapters_bytes + adapters_bytes / max(1, distinct(batch.adapters))
            offload = asdict(Offload(model.packed, model.digest, limit - OWN_BYTES)) | {"folder": str(model.packed)}
            pages = math.ceil(n_bytes / kv_bytes(shape, 1, PAGE_TOKENS - 1))
            work |= {"executor": "cpu", "dtype": dtype, "adapter_pages": pages, "offload": offload}
            return command(sys.executable, "weft_worker"), work

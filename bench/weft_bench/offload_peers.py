"""`weft bench offload --cases peers`: ours, accelerate, llama.cpp, each alone in a memory group of the same limit."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench.cpu_decode import Batch
from weft_bench.cpu_engine import PAGE_TOKENS
from weft_bench.cpu_shapes import DISTINCT, RANK, distinct, prompts
from weft_bench.offload_model import Context, OffloadModel
from weft_bench.peers.compare import Load, checked
from weft_bench.peers.engines import GGUF_KINDS, PEERS, gguf_files
from weft_bench.peers.worker import Worker, command
from weft_bench.roofline import kv_bytes
from weft_stage.errors import PeerFailed
from weft_stage.lines import Line
from weft_stage.memory_group import MemoryGroup, forget, memory_group
from weft_stage.shapes import BF16_BYTES

OURS, ACCELERATE, LLAMA = "weft", "accelerate", "llama.cpp"
RUNTIME_BYTES = 512 << 20  # Python, torch and transformers before there is any weight: the largest of the three
OWN_BYTES = 384 << 20  # of it, what ours takes: torch alone 300
ANSWER_S = 900.0
BATCHES = {OURS: (1, 4, 8, 16), ACCELERATE: (1, 4, 8), LLAMA: (1, 8)}
PASS_TOKENS = 2048  # of ours: the prompts of larger batches come in several passes, which take less memory
ONE_AFTER_THE_OTHER = (1,)  # rows of llama.cpp, where each has an adapter of its own: more of them gain nothing
WARM_TOKENS, WARM_OUTPUT = 16, 2


@dataclass(frozen=True, slots=True)
class Run:
    """One engine and batch in its group: tokens/s of the whole run, prompts included; None: it did not fit."""

    rows: int
    tokens_per_s: float | None
    peak_bytes: int
    versions: str


def figures(model: OffloadModel, context: Context) -> Iterator[Line]:
    """Each budget and popularity. Raises NoGroup, PeerFailed."""
    options = model.options
    found, _ = model.figures(Batch(1, options.popularities[0]))  # and the packed file is there
    weights = found.resident_bytes + found.streamed_bytes
    for share in options.shares:
        for popularity in options.popularities:
            limit = int(share * weights) + RUNTIME_BYTES
            runs = {who: _sweep(model, context, who, popularity, limit) for who in (OURS, ACCELERATE, LLAMA)}
            case = (
                f"{model.title}, {share:.0%} of the weights, {popularity}, a group of {limit >> 20} MiB{model.lengths}"
            )
            yield from compared(model, context, case, runs)


def compared(
    model: OffloadModel, context: Context, case: str, runs: Mapping[str, Sequence[Run]]
) -> Iterator[Line]:  # fmt: skip
    """Every batch of every engine, the best of each, and the ratios against it."""
    for who, sweep in runs.items():
        for run in sweep:
            yield context.origin.line(case, f"{who}, {run.rows} rows", run.tokens_per_s, "tokens/s")
        yield context.origin.line(case, f"{who}, most memory", max(run.peak_bytes for run in sweep) / (1 << 20), "MiB")
    ours = best(runs[OURS])
    for who, sweep in runs.items():
        theirs = best(sweep)
        if who != OURS:
            ratio = None if ours is None or not theirs else ours / theirs
            target = ">= 1" if model.options.usual else None
            yield context.origin.line(f"{case}, against {who}", "times as fast", ratio, "x", target=target)


def best(sweep: Sequence[Run]) -> float | None:
    """Tokens/s of the best batch; None where none fits."""
    return max((run.tokens_per_s for run in sweep if run.tokens_per_s is not None), default=None)


def _sweep(model: OffloadModel, context: Context, who: str, popularity: str, limit: int) -> list[Run]:
    batches = ONE_AFTER_THE_OTHER if who == LLAMA and popularity == DISTINCT else BATCHES[who]
    label = f"{model.name}: {who}, {popularity}, {limit >> 20} MiB"
    with context.bar(label, len(batches)) as advanced:
        runs = list[Run]()
        for rows in batches:
            runs.append(_run(model, context, who, Batch(rows, popularity), limit))
            advanced(1)
    return runs


def _run(model: OffloadModel, context: Context, who: str, batch: Batch, limit: int) -> Run:
    """A short run, and then the whole one. What an engine says that ends by itself is told: it did not fit."""
    options = model.options
    folders = tuple(None if number is None else str(model.adapter(number)) for number in batch.adapters)
    load = Load(folders, options.prompt_tokens, options.tokens, model.shape.vocab)
    with TemporaryDirectory(prefix="weft-offload-") as scratch, memory_group(limit) as group:
        worker, speed = _worker(who, Place(model, batch, load, limit, Path(scratch)), group), None
        try:
            with worker:
                short = prompts(model.rng, batch.rows, WARM_TOKENS, load.vocab)
                checked(who, load, WARM_OUTPUT, worker.run(short, WARM_OUTPUT))
                whole = prompts(model.rng, batch.rows, load.prompt_tokens, load.vocab)
                speed = load.rows * load.tokens / checked(who, load, load.tokens, worker.run(whole, load.tokens))
        except PeerFailed as error:
            context.said(f"{who}, {batch.name}, {limit >> 20} MiB: {error}")
        return Run(batch.rows, speed, group.peak_bytes, worker.versions)


@dataclass(frozen=True, slots=True)
class Place:
    """What an engine is made for. `limit`: bytes of its group; `scratch`: a folder of its own."""

    model: OffloadModel
    batch: Batch
    load: Load
    limit: int
    scratch: Path


Made = tuple[list[str], Mapping[str, object]]  # command, and its work beside what all engines get


def _worker(who: str, place: Place, group: MemoryGroup) -> Worker:
    load, model = place.load, place.model
    common = {
        "base": str(model.base), "adapters": load.adapters, "max_rank": RANK, "threads": model.options.quota,
        "context_tokens": load.prompt_tokens + load.tokens + 1,
        "batch_tokens": min(PASS_TOKENS, load.rows * load.prompt_tokens),
    }  # fmt: skip
    words, work = MAKERS[who](place)
    return Worker(who, group.command(words), {**common, **work}, place.scratch / "log", answer_s=ANSWER_S)


def _ours(place: Place) -> Made:
    offload = place.model.offload(place.limit - OWN_BYTES)
    work = {
        "executor": "cpu", "dtype": place.model.options.dtype, "adapter_pages": _adapter_pages(place),
        "offload": asdict(offload) | {"folder": str(offload.folder)},
    }  # fmt: skip
    return command(sys.executable, "weft_worker"), work


def _adapter_pages(place: Place) -> int:
    """KV pages of all adapters, a tenth padding, and of one that comes while another one leaves."""
    n_bytes, page = (
        place.batch.adapters_work(place.model.shape).n_bytes,
        kv_bytes(place.model.shape, 1, PAGE_TOKENS - 1),
    )
    return math.ceil((1.1 * n_bytes + n_bytes / max(1, distinct(place.batch.adapters))) / page)


def _accelerate(place: Place) -> Made:
    """What the limit leaves beside KV, adapters and two layers on their way is for weights."""
    shape, load = place.model.shape, place.load
    kv = kv_bytes(shape, load.rows, load.prompt_tokens + load.tokens)
    beside = RUNTIME_BYTES + kv + place.batch.adapters_work(shape).n_bytes + 2 * BF16_BYTES * shape.layer_weights
    forget([place.model.base / "model.safetensors"])
    weights_bytes, folder = max(0, int(place.limit - beside)), str(place.scratch)
    work = {"weights_bytes": weights_bytes, "folder": folder, "libraries": ("accelerate",)}
    return command(sys.executable, "transformers_worker"), work


def _llama(place: Place) -> Made:
    options, model = place.model.options, place.model
    assert options.peers_python is not None
    folder, kind, peer = options.folder / model.name / "gguf", GGUF_KINDS[options.dtype], PEERS[LLAMA]
    files = gguf_files(options.peers_python, folder, kind, model.base, place.load.adapters)
    forget(folder.glob("*.gguf"))
    return command(options.peers_python, peer.worker), {"gguf": files, "kind": kind, "libraries": peer.libraries}


MAKERS: dict[str, Callable[[Place], Made]] = {OURS: _ours, ACCELERATE: _accelerate, LLAMA: _llama}

"""Kernels compiled ahead of the measurements, in several processes: one after the other they would take minutes.

Triton keeps what it compiles on disk. Which variants a step needs follows from how many chunks it has and how large
these may be: the parts that a shrink is cut into are constants of the kernels, for few buckets of the number. So a step
of each is run once, on a model whose layers are all the same tensors. What fails here fails again, and is told, where
it is measured.
"""

from collections.abc import Callable, Iterator

from weft_bench.cpu_shapes import BASE, DISTINCT
from weft_bench.gpu_amounts import SHAPES, Amounts, Batch, operator_batches
from weft_bench.gpu_attention import splits_of
from weft_bench.gpu_decode import Loaded, RowOf
from weft_bench.gpu_device import Gpu
from weft_bench.gpu_messages import share_of
from weft_bench.gpu_operator import made
from weft_bench.roofline import Shape
from weft_kernels.triton.lora import chunk_bucket
from weft_runner.model.cuda.executor import DECODE_CHUNK, PROMPT_CHUNK

LONG_PROMPT = 192  # in chunks of prompts, three of them


def run(gpu: Gpu, name: str, amounts: Amounts) -> None:
    """One share of a shape's steps, or of the operators (`gpu_messages.share_of`)."""
    what, share, shares = share_of(name)
    work = list(_steps(gpu, SHAPES[what], amounts) if what in SHAPES else _operators(gpu, amounts))
    for each in work[share::shares]:
        each()
    gpu.free()


def chunk_counts(kv_heads: int, most: int, sms: int) -> list[int]:
    """The numbers of chunks, up to `most`, of which no two make the same launches."""
    kinds: dict[tuple[int, int], int] = {}
    for chunks in range(1, most + 1):
        kinds.setdefault((chunk_bucket(chunks), splits_of(chunks, kv_heads, sms)[1].bit_length()), chunks)
    return list(kinds.values())


def _steps(gpu: Gpu, shape: Shape, amounts: Amounts) -> Iterator[Callable[[], None]]:
    most = max(amounts.most_rows, amounts.text_rows) + 1
    loaded = Loaded.of(gpu, shape, most, LONG_PROMPT, graphs=False, alike=True)
    for chunks in chunk_counts(shape.kv_heads, most, gpu.sms):
        for popularity in (DISTINCT, BASE):
            yield lambda chunks=chunks, popularity=popularity: _run_decode(loaded, Batch(chunks, popularity))
            yield lambda chunks=chunks, popularity=popularity: _run_prompt(loaded, Batch(chunks, popularity))


def _run_decode(loaded: Loaded, batch: Batch) -> None:
    """A chunk a row, and the same with a short prompt in the first row's place."""
    rows = [RowOf(1, 8, slot) for slot in batch.adapters]
    for first in (rows[0], RowOf(DECODE_CHUNK, 0, rows[0].slot)):
        loaded.executor.run(loaded.step([first, *rows[1:]]))


def _run_prompt(loaded: Loaded, batch: Batch) -> None:
    """A prompt in large chunks, and a row for each chunk that it does not make."""
    slots = batch.adapters
    rest = [RowOf(1, 8, slot) for slot in slots[LONG_PROMPT // PROMPT_CHUNK :]]
    loaded.executor.run(loaded.step([RowOf(LONG_PROMPT, 0, slots[0]), *rest]))


def _operators(gpu: Gpu, amounts: Amounts) -> Iterator[Callable[[], None]]:
    for operator in amounts.operators:
        for batch in operator_batches(operator, amounts):
            yield lambda operator=operator, batch=batch: made(gpu, operator, batch).run()

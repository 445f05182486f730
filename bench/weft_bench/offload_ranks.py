"""`weft bench offload --cases ranks`: a model over two pipeline ranks, each with its budget, beside one rank."""

from collections.abc import Iterator
from dataclasses import replace

from weft_bench.cpu_context import WEIGHT_BYTES
from weft_bench.cpu_decode import Batch
from weft_bench.cpu_engine import PAGE_TOKENS, pages_of
from weft_bench.offload_model import Context, OffloadModel
from weft_bench.roofline import base_bytes, kv_bytes
from weft_stage.lines import Line
from weft_stage.playing import Played

SHARE = 0.4  # of the weights' bytes, a rank
MIN_SPEEDUP = 1.8


def figures(model: OffloadModel, context: Context) -> Iterator[Line]:
    """Each batch. Raises EngineRefused, WrongAdapter."""
    options = model.options
    weights = int(base_bytes(model.shape, WEIGHT_BYTES[options.dtype]))
    for rows in options.rows:
        for popularity in options.popularities:
            batch = Batch(rows, popularity)
            _, beside = model.figures(batch)
            sizes = model.sizes(batch, model.offload(0))
            kv = int(kv_bytes(model.shape, 1, PAGE_TOKENS - 1)) * pages_of(sizes)
            case = f"{model.title}, {SHARE:.0%} of the weights a rank, {rows} rows, {popularity}{model.lengths}"
            with context.bar(case, 2) as advanced:
                one = _played(model, batch, 1, beside + int(SHARE * weights))
                advanced(1)
                two = _played(model, batch, 2, beside - kv // 2 + int(SHARE * weights))
                advanced(1)
            for ranks, played in ((1, one), (2, two)):
                yield context.origin.line(case, f"{ranks} rank{'s' * (ranks > 1)}", rate(played), "tokens/s")
            target = f">= {MIN_SPEEDUP}" if options.usual and rows > 1 else None
            yield context.origin.line(case, "two over one", rate(two) / rate(one), "x", target=target)


def rate(played: Played) -> float:
    return played.tokens / played.wall_s


def _played(model: OffloadModel, batch: Batch, ranks: int, device_bytes: int) -> Played:
    sizes = replace(model.sizes(batch, model.offload(device_bytes)), stages=ranks)
    with model.subject(sizes) as subject:
        model.play(subject, batch, warm=True)
        return model.play(subject, batch)

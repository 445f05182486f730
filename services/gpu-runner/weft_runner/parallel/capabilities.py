"""What an executor does beyond running a step while it is called: asked once, by whoever makes an engine of it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft_runner.model.cpu.adapters import CpuAdapterStore
from weft_runner.model.executor import AsyncExecutor, Executor, Offloads, Pipelined
from weft_runner.model.layer_progress import CountsLayers, LayerProgress
from weft_runner.model.tiers.budget import Offloading
from weft_runner.offload.figures import OffloadFigures
from weft_runner.parallel.adapters import ShardedAdapterStore
from weft_runner.parallel.executor import MultiProcessExecutor
from weft_runner.parallel.pipeline import OffloadedPipeline


class Capabilities(NamedTuple):
    """None: it does not.

    `follows`: it computes beside the host, one step behind the other; `pipelined`: in several stages; `ranks`: in
    several processes. `offloads`: its weights come from disk, with `figures` of each stage, and no more than
    `adapter_pages` may be adapters'. `layer_counter`: its own, raised while a step runs. `packs`: adapters are packed
    on the engine's thread, between steps. `close`: ends what it has started, once the engine has ended.
    """

    follows: AsyncExecutor | None = None
    pipelined: Pipelined | None = None
    ranks: MultiProcessExecutor | None = None
    offloads: Offloads | None = None
    figures: Callable[[], Sequence[OffloadFigures]] | None = None
    adapter_pages: int | None = None
    layer_counter: LayerProgress | None = None
    packs: CpuAdapterStore | None = None
    close: Callable[[], None] = lambda: None

    @property
    def launches(self) -> bool:
        """Say whether steps are not complete when a call returns."""
        return self.pipelined is not None or self.follows is not None


def capabilities_of(executor: Executor) -> Capabilities:
    """Ask an executor which interfaces it has."""
    pipelined = executor if isinstance(executor, Pipelined) else None
    ranks = executor if isinstance(executor, MultiProcessExecutor) else None
    disk = executor if isinstance(executor, Offloading) else None
    disks = ranks if isinstance(ranks, OffloadedPipeline) else None
    adapters = executor.adapters
    own = adapters.own if isinstance(adapters, ShardedAdapterStore) else adapters
    can = Capabilities(
        follows=executor if pipelined is None and isinstance(executor, AsyncExecutor) else None,
        pipelined=pipelined,
        ranks=ranks,
        offloads=executor if isinstance(executor, Offloads) else None,
        layer_counter=executor.layer_counter if isinstance(executor, CountsLayers) else None,
        packs=own if isinstance(own, CpuAdapterStore) else None,
    )
    if disk is not None:
        pages = disk.most_adapter_pages
        can = can._replace(figures=lambda: [disk.figures], adapter_pages=pages, close=disk.close)
    elif disks is not None:
        can = can._replace(figures=lambda: disks.stage_figures, adapter_pages=disks.frames, close=disks.close)
    elif ranks is not None:
        can = can._replace(close=ranks.close)
    return can

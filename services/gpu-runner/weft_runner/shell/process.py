"""The running process: base from the depot, engine in its thread, server and reporter on the loop, drain at the end."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prometheus_client import REGISTRY

from weft.domain.ids import RunnerId
from weft.domain.machine import Received
from weft.domain.runner import RunnerRole, RunnerSpec
from weft.files import write_atomically
from weft.telemetry.invariants import report
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.progress import ByteProgress
from weft.telemetry.tracing import Tracer
from weft.wire.serving import heartbeat, serve, stop_on_signals
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1.runner_pb2_grpc import add_RunnerServicer_to_server
from weft_runner.errors import ArtifactUnreachable, StoppedAtStart
from weft_runner.model.checkpoint import Files
from weft_runner.settings import RunnerSettings
from weft_runner.shell.depot import DepotSource
from weft_runner.shell.engine import EngineThread, Output
from weft_runner.shell.engine_factory import EngineBundle, build_engine
from weft_runner.shell.kv_ranks import ShardedKvStreams
from weft_runner.shell.kv_stream import KvEvent, Post
from weft_runner.shell.kv_transfer import KvPlace, KvStreamShell, kv_address
from weft_runner.shell.metrics import RunnerMetrics
from weft_runner.shell.rank_link import gather_ranks
from weft_runner.shell.server import RunnerServer, check_backlog
from weft_runner.shell.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)
ENGINE_STOP_S = 5.0
BASE_WAIT_S = 120.0  # for a depot that is not up yet: past that the pod's back-off does as well, and is seen
REPORT_FLUSH_S = 1.0


async def serve_runner(
    settings: RunnerSettings, probes: Probes, set_not_ready: Callable[[Callable[[], str | None]], None],
    tls: Tls | None = None, tracer: Tracer | None = None,
) -> int:  # fmt: skip
    """Serve until SIGTERM, here or at another rank, or a bug in the engine.

    Returns the exit code; raises RunnerError before serving.
    """
    stop, loop = stop_on_signals(), asyncio.get_running_loop()
    runner = read_identity(settings.data_dir, settings.pool)
    metrics = RunnerMetrics(REGISTRY, settings.model_name)
    source = DepotSource(
        settings.depot, settings.blobs, settings.base_digest, stop.is_set, shared=settings.model_cache is not None,
        tls=tls, on_damaged=partial(metrics.count, "corrupt_artifacts"), on_full=probes.shortages.note,
    )  # fmt: skip

    def on_output(output: Output) -> None:
        app.on_output(output)

    def on_stopping() -> None:
        loop.call_soon_threadsafe(stop.set)

    def load() -> EngineBundle:
        files = fetch_base(source, BASE_WAIT_S, stop.is_set, progress=progress)
        return build_engine(settings, files, source, on_output, stop.is_set, runner, gather, progress)

    gather = gather_ranks(settings, tls, on_stopping) if settings.hosts > 1 else None
    progress = ByteProgress()
    set_not_ready(lambda: str(progress) or "starting")
    beat = asyncio.create_task(heartbeat(probes))  # the base may take minutes: alive, not ready, and SIGTERM is heard
    try:
        built = await asyncio.to_thread(load)
    finally:
        beat.cancel()
    try:
        app = RunnerApp(settings, runner, built, metrics, stop, tls, tracer)
        set_not_ready(app.server.not_ready)
        await app.serve(probes)
    finally:
        await asyncio.to_thread(built.close)
    return app.exit_code


def read_identity(data_dir: Path, pool: str) -> RunnerId:
    """Read who this runner is: its data directory's UUID, and an incarnation that is new at each start.

    The UUID begins with the namespace of its pool: supervisors accept it from certificates of that namespace. It is
    drawn and written whole at the first start; a damaged one is drawn again.
    """
    path = data_dir / "uuid"
    drawn: uuid.UUID | None = None
    if path.exists():
        try:
            drawn = uuid.UUID(path.read_text().strip())
        except ValueError as error:  # also what is no text
            log.error("damaged uuid thrown away: this is another runner now", extra=kv(path=path, error=error))
    if drawn is None:
        drawn = uuid.uuid4()
        write_atomically(path, f"{drawn}\n".encode())
    return RunnerId(f"{pool.partition('/')[0]}.{drawn}", uuid.uuid4().hex)


def fetch_base(
    source: DepotSource, wait_s: float, stopping: Callable[[], bool], clock: Callable[[], float] = time.monotonic,
    progress: ByteProgress | None = None,
) -> Files:  # fmt: skip
    """The base's files; a depot that is not up yet is waited for, at most `wait_s`.

    Raises ArtifactUnknown, AdapterInvalid, StoppedAtStart, ArtifactUnreachable when the time is over.
    """
    deadline = clock() + wait_s
    while True:
        try:
            return source.base(progress)
        except ArtifactUnreachable as error:
            if stopping():
                raise StoppedAtStart("stopped before the base was here") from error
            if clock() >= deadline:
                raise
            log.warning("the base is not here yet", extra=kv(detail=error))


class RunnerApp:
    """The running process between start and exit."""

    def __init__(
        self, settings: RunnerSettings, runner: RunnerId, built: EngineBundle, metrics: RunnerMetrics,
        stop: asyncio.Event, tls: Tls | None, tracer: Tracer | None,
    ) -> None:  # fmt: skip
        self._settings, self._runner, self._stop, self._tls = settings, runner, stop, tls
        self._loop = asyncio.get_running_loop()
        self.exit_code = 0
        self._engine = built.engine
        metrics.built(built.engine.runner.pool, built.profile)
        if (stages := built.engine.executor.can.stages) is not None:
            metrics.show_offload(lambda: [stage.figures for stage in stages()])
        self._kv_address = self._exchange_kv(built, metrics)
        self.server = RunnerServer(built.engine, runner, metrics, tracer)
        self._thread = EngineThread(built.engine, built.torch_threads, self._on_engine_failure)
        supervisor = partial(channel, settings.supervisor, tls, "supervisor")
        self._link = SupervisorLink(built.engine, self._spec(built), supervisor, self.server.on_order)

    def _exchange_kv(self, built: EngineBundle, metrics: RunnerMetrics) -> str:
        """With other runners, if it is to; the address where they send it. Raises AddressInUse."""
        settings, engine = self._settings, built.engine
        ranks, layers = engine.executor.can.ranks, engine.layers
        memory = engine.executor.kv_memory if ranks is None else ranks.kv_shard
        if built.limits.kv is None or memory is None:
            return ""

        def post(event: KvEvent) -> None:
            if isinstance(event, Received):
                check_backlog(engine)
            engine.post(event)

        place = KvPlace(settings.kv_listen, self._runner, settings.pool, settings.page_tokens, self._tls)

        def shell(post: Post) -> KvStreamShell:
            return KvStreamShell(place, memory, layers, post, metrics.count)

        engine.exchange_kv(shell(post) if ranks is None else ShardedKvStreams(shell, ranks.others, post))
        return kv_address(settings.kv_listen, settings.advertise)

    async def serve(self, probes: Probes) -> None:
        """Engine first, so that a first status is there; then the supervisor; then the port."""
        self.server.supervisor = self._link
        self._thread.start()
        await self.server.first_status()
        linking = asyncio.create_task(self._link.run())
        linking.add_done_callback(self._on_link_end)
        log.info("runner started", extra=kv(runner=self._runner.uuid, incarnation=self._runner.incarnation))
        await serve(
            lambda server: add_RunnerServicer_to_server(self.server, server), listen=self._settings.listen,
            names=("weft.v1.Runner",), stop=self._stop, probes=probes, drain=self._drain, tls=self._tls,
        )  # fmt: skip
        await self._close(linking)

    async def _close(self, linking: "asyncio.Task[None]") -> None:
        self._link.close()
        done, _ = await asyncio.wait([linking], timeout=REPORT_FLUSH_S)
        if not done:
            linking.cancel()
        if not await asyncio.to_thread(self._thread.stop, ENGINE_STOP_S):
            log.warning("the engine did not end in time")

    async def _drain(self) -> None:
        if not self.exit_code:  # a dead engine gives nothing back
            await self.server.drain_and_close()

    def on_output(self, output: Output) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: Output) -> None:
        try:
            self.server.deliver(output)
        except Exception as error:
            log.exception("the engine's output was not delivered")
            self._fail("delivery", error)

    def _on_engine_failure(self, error: BaseException) -> None:
        """From the engine's thread. Books that do not balance end it: they decide whose tokens a page holds."""
        if isinstance(error, AssertionError):
            report(error)
        self._loop.call_soon_threadsafe(self._fail, "engine", error)

    def _on_link_end(self, linking: "asyncio.Task[None]") -> None:
        if not linking.cancelled() and (error := linking.exception()) is not None:
            log.error("the link to the supervisor failed", exc_info=error)
            self._fail("supervisor link", error)

    def _fail(self, part: str, error: BaseException) -> None:
        """Nothing can be served any more: let go of lease and streams at once, end, and be started anew."""
        log.critical("the runner has failed", extra=kv(part=part, error=type(error).__name__))
        self.exit_code = 1
        self._link.close()
        self.server.abort()
        self._stop.set()

    def _spec(self, built: EngineBundle) -> RunnerSpec:
        settings, limits, profile = self._settings, built.limits, built.profile
        return RunnerSpec(
            runner=self._runner, address=settings.advertise, pool=settings.pool, base_digest=settings.base_digest,
            numerics_class=built.numerics_class, page_tokens=limits.page_tokens, total_pages=limits.total_pages,
            max_sequences=limits.max_sequences, max_adapters=limits.max_adapters, max_rank=settings.max_rank,
            max_context_tokens=limits.max_context_tokens, name=settings.name,
            best_batch=profile.best_batch if profile else 0, step_ms_1=profile.step_ms_1 if profile else 0.0,
            step_ms_best=profile.step_ms_best if profile else 0.0,
            prefill_tokens_per_s=profile.prefill_tokens_per_s if profile else 0.0, page_bytes=limits.page_bytes,
            kv_address=self._kv_address, kv_layout=limits.kv.kv_layout if limits.kv else "",
            kv_bytes_per_s=profile.kv_bytes_per_s if profile else 0.0, swaps=limits.swap_page_bytes > 0,
            role=None if settings.role == "any" else RunnerRole(settings.role), checks_drafts=built.checks_drafts,
        )  # fmt: skip

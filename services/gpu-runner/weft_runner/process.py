"""The running process: base from the depot, engine in its thread, server and reporter on the loop, drain at the end."""

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import REGISTRY

from weft.telemetry.invariants import report
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.channels import channel
from weft.wire.serving import beating, serve, stop_on_signals
from weft.wire.tls import Tls
from weft.wire.v1 import common_pb2, supervisor_pb2, supervisor_pb2_grpc
from weft.wire.v1.runner_pb2_grpc import add_RunnerServicer_to_server
from weft_runner.depot import DepotSource
from weft_runner.engine import EngineThread, Iteration
from weft_runner.engine_factory import EngineBundle, build_engine
from weft_runner.errors import ArtifactUnreachable, StoppedAtStart
from weft_runner.identity import Identity, read_identity
from weft_runner.metrics import Metrics
from weft_runner.model.weights import Files
from weft_runner.report import Reporter
from weft_runner.server import RunnerServer
from weft_runner.settings import Settings

log = logging.getLogger(__name__)
ENGINE_STOP_S = 5.0
REPORT_FLUSH_S = 1.0


async def serve_runner(
    settings: Settings,
    probes: Probes,
    set_not_ready: Callable[[Callable[[], str | None]], None],
    tls: Tls | None = None,
) -> int:
    """Serve until SIGTERM or a bug in the engine. Returns the exit code; raises RunnerError before serving."""
    stop = stop_on_signals()
    identity = read_identity(settings.data_dir, settings.pool)
    metrics = Metrics(REGISTRY, settings.model_name)
    source = DepotSource(
        settings.depot,
        settings.data_dir / "blobs",
        settings.base_digest,
        stop.is_set,
        tls=tls,
        on_damaged=metrics.corrupt_artifact,
    )

    def on_iteration(iteration: Iteration) -> None:
        life.on_iteration(iteration)

    beat = asyncio.create_task(beating(probes))  # the base may take minutes: alive, not ready, and SIGTERM is heard
    try:
        built = await asyncio.to_thread(load, settings, source, on_iteration, stop.is_set)
    except StoppedAtStart as error:
        log.info("stopped before serving", extra=kv(reason=error))
        return 0
    finally:
        beat.cancel()
    try:
        life = _Life(settings, identity, built, metrics, stop, tls)
        set_not_ready(life.server.not_ready)
        await life.serve(probes)
    finally:
        await asyncio.to_thread(built.close)
    return life.exit_code


def load(
    settings: Settings, source: DepotSource, on_iteration: Callable[[Iteration], None], stopping: Callable[[], bool]
) -> EngineBundle:
    """The base from the depot, and the engine around it. Blocking. Raises RunnerError."""
    files = fetch_base(source, settings.base_wait_s, stopping)
    return build_engine(settings, files, source, on_iteration, stopping)


def fetch_base(
    source: DepotSource,
    wait_s: float,
    stopping: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> Files:
    """The base's files; a depot that is not up yet is waited for, at most `wait_s`.

    Raises ArtifactUnknown, AdapterInvalid, StoppedAtStart, ArtifactUnreachable when the time is over.
    """
    deadline = clock() + wait_s
    while True:
        try:
            return source.base()
        except ArtifactUnreachable as error:
            if stopping():
                raise StoppedAtStart("told to stop before the base was here") from error
            if clock() >= deadline:
                raise
            log.warning("the depot does not answer yet", extra=kv(detail=error))


class _Life:
    """What lives between start and exit."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        built: EngineBundle,
        metrics: Metrics,
        stop: asyncio.Event,
        tls: Tls | None,
    ) -> None:
        self._settings, self._identity, self._stop, self._tls = settings, identity, stop, tls
        self._loop = asyncio.get_running_loop()
        self.exit_code = 0
        self._engine = built.engine
        if built.profile is not None:
            metrics.profiled(built.profile)
        self.server = RunnerServer(built.engine, identity, metrics)
        self._thread = EngineThread(built.engine, built.torch_threads, self._on_engine_failure)
        self._channel = channel(settings.supervisor, tls, "supervisor")
        stub = supervisor_pb2_grpc.SupervisorStub(self._channel)
        self._reporter = Reporter(built.engine, self._hello(built), stub.Runner, self.server.drain)

    async def serve(self, probes: Probes) -> None:
        """Engine first, so that the first hello can tell a whole state; then the port; then the supervisor."""
        self.server.reporter = self._reporter
        self._thread.start()
        await self.server.first_state()
        reporting = asyncio.create_task(self._reporter.run())
        reporting.add_done_callback(self._on_reporter_end)
        log.info("runner started", extra=kv(runner=self._identity.uuid, incarnation=self._identity.incarnation))
        await serve(
            lambda server: add_RunnerServicer_to_server(self.server, server),
            listen=self._settings.listen,
            names=("weft.v1.Runner",),
            stop=self._stop,
            probes=probes,
            drain=self._drain,
            tls=self._tls,
        )
        await self._close(reporting)

    async def _close(self, reporting: "asyncio.Task[None]") -> None:
        self._reporter.close()
        done, _ = await asyncio.wait([reporting], timeout=REPORT_FLUSH_S)
        if not done:
            reporting.cancel()
        await self._channel.close(None)
        if not await asyncio.to_thread(self._thread.stop, ENGINE_STOP_S):
            log.warning("the engine did not end in time")

    async def _drain(self) -> None:
        if not self.exit_code:  # a dead engine gives nothing back
            await self.server.drain_and_close()

    def on_iteration(self, iteration: Iteration) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, iteration)

    def _deliver(self, iteration: Iteration) -> None:
        try:
            self.server.deliver(iteration)
        except Exception as error:
            log.exception("what an iteration produced was not delivered")
            self._fail("delivery", error)

    def _on_engine_failure(self, error: BaseException) -> None:
        """From the engine's thread. Books that do not balance end it: they say whose tokens a page holds."""
        if isinstance(error, AssertionError):
            report(error)
        self._loop.call_soon_threadsafe(self._fail, "engine", error)

    def _on_reporter_end(self, reporting: "asyncio.Task[None]") -> None:
        if not reporting.cancelled() and (error := reporting.exception()) is not None:
            log.error("the reporter failed", exc_info=error)
            self._fail("reporter", error)

    def _fail(self, part: str, error: BaseException) -> None:
        """Nothing can be served any more: let go of lease and streams at once, end, and be started anew."""
        log.critical("the runner has failed", extra=kv(part=part, error=type(error).__name__))
        self.exit_code = 1
        self._reporter.close()
        self.server.abort()
        self._stop.set()

    def _hello(self, built: EngineBundle) -> supervisor_pb2.RunnerHello:
        settings, limits = self._settings, built.limits
        hello = supervisor_pb2.RunnerHello(
            runner=common_pb2.RunnerId(uuid=self._identity.uuid, incarnation=self._identity.incarnation),
            address=settings.advertise,
            pool=settings.pool,
            base_digest=settings.base_digest,
            numerics_class=built.numerics_class,
            page_tokens=limits.page_tokens,
            total_pages=limits.total_pages,
            max_sequences=limits.max_sequences,
            max_adapters=limits.max_adapters,
            max_rank=settings.max_rank,
            max_context_tokens=limits.max_context_tokens,
            name=settings.name,
        )
        if (profile := built.profile) is not None:
            hello.best_batch = profile.best_batch
            hello.step_ms_1, hello.step_ms_best = profile.step_ms_1, profile.step_ms_best
            hello.prefill_tokens_per_s = profile.prefill_tokens_per_s
        return hello

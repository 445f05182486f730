"""The process: `weft_predictor [flags]` serves."""

import asyncio
import contextlib
import logging
import sys
from functools import partial

import grpc.aio
import uvloop

from weft.leadership.standby import holder_name, turn_of
from weft.process import EXIT_CANNOT_START, CannotStart, lock_data_dir
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.tracing import tracer
from weft.wire.serving import serve, stop_on_signals
from weft.wire.tls import load_tls
from weft.wire.v1.predictor_pb2_grpc import add_PredictorServicer_to_server
from weft_predictor import metrics
from weft_predictor.checkpoint import Checkpointer
from weft_predictor.core.promotion import PromotedModel, PromotionDecision
from weft_predictor.core.replayed_lengths import ReplayedLengths
from weft_predictor.errors import PredictorError
from weft_predictor.models import SAVED, ModelWatch, first_models, offer
from weft_predictor.server import PredictorServer
from weft_predictor.settings import PredictorSettings

log = logging.getLogger(__name__)
# The time between two checks of the files of --model. A check is a stat of each file, and a volume's new content is
# late anyhow.
WATCH_S = 10.0
# The model is saved after this number of outcomes, or this time after it learned something: the loss of a crash.
SAVE_OUTCOMES, SAVE_S = 500, 30.0


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. Return 0 after a drain, 1 if another predictor acts, 2 if it cannot start.

    It cannot start with wrong settings, an address or a data directory in use, or without an API server for its Lease.
    """
    settings = PredictorSettings.parse(sys.argv[1:] if argv is None else argv)
    logs.configure("predictor", level=settings.log_level, fmt=settings.log_format)
    try:
        with lock_data_dir(settings.data_dir, "predictor"):
            return uvloop.run(_run(settings))
    except (CannotStart, OSError, PredictorError) as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


def report(decision: PromotionDecision) -> None:
    """Log the decision on a candidate."""
    metrics.MODELS.labels(decision.result).inc()
    figures = kv(served=decision.served, gain=round(decision.gain, 4), judged=decision.judged)
    log.info(f"model {decision.result}", extra=kv(candidate=decision.candidate) | figures)


async def _watch(settings: PredictorSettings, server: PredictorServer, model: PromotedModel) -> None:
    if settings.model is None or isinstance(model.served, ReplayedLengths):
        return
    await ModelWatch(settings.model, WATCH_S, lambda candidate: server.in_turn(partial(offer, model, candidate))).run()


async def _run(settings: PredictorSettings) -> int:
    """Stand by if a Lease is configured, then serve until a signal or until the Lease is lost."""
    stop, serving = stop_on_signals(), asyncio.Event()

    def not_ready() -> str | None:
        if stop.is_set():
            return "draining"
        return None if settings.lease or serving.is_set() else "the model is being read"

    probes = Probes(settings.probes, not_ready)
    with contextlib.closing(probes):
        probes.start()
        identity = partial(holder_name, settings.data_dir)
        async with turn_of(settings, identity, stop, probes, metrics.LEADER) as turn:
            if turn is None:
                return 0
            await _act(settings, stop, probes, serving)
            return 0 if turn.lost is None else 1


async def _act(settings: PredictorSettings, stop: asyncio.Event, probes: Probes, serving: asyncio.Event) -> None:
    tls = load_tls(settings.tls_dir, "predictor")
    served, candidate = first_models(settings.data_dir, settings.model)
    served.scale = settings.scale
    model = PromotedModel(served, report)
    if candidate:
        offer(model, candidate)
    spans = tracer("predictor")
    server = PredictorServer(model, spans)
    path = settings.data_dir / SAVED
    checkpointer = Checkpointer(server, path, outcomes=SAVE_OUTCOMES, seconds=SAVE_S)
    log.info("model ready", extra=kv(version=model.version))
    serving.set()
    saving = asyncio.create_task(checkpointer.run())
    watching = asyncio.create_task(_watch(settings, server, model))

    async def drain() -> None:
        server.close_streams()

    def register(grpc_server: grpc.aio.Server) -> None:
        add_PredictorServicer_to_server(server, grpc_server)

    names = ("weft.v1.Predictor",)
    try:
        await serve(register, listen=settings.listen, names=names, stop=stop, probes=probes, drain=drain, tls=tls)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        checkpointer.close()
        await saving
        server.close()
        if spans:
            spans.close()

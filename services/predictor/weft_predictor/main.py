"""The process: `weft_predictor [flags]` serves, `weft_predictor train DATA` fits and measures."""

import asyncio
import logging
import secrets
import sys
from pathlib import Path

import grpc.aio

from weft.process import EXIT_CANNOT_START, CannotStart, lock_data_dir
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.serving import serve, stop_on_signals
from weft.wire.tls import load_tls
from weft.wire.v1.predictor_pb2_grpc import add_PredictorServicer_to_server
from weft_predictor.checkpoint import Checkpointer, load
from weft_predictor.core.length_model import LengthModel
from weft_predictor.core.ridge_model import RidgeModel
from weft_predictor.errors import CorruptModel
from weft_predictor.server import PredictorServer
from weft_predictor.settings import PredictorSettings

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. 0 after a drain, 2 for wrong settings, an address or a data directory in use."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"]:
        from weft_predictor import training  # with scipy: serving starts without it

        return training.main(argv[1:])
    settings = PredictorSettings.parse(argv)
    logs.configure("predictor", level=settings.log_level, fmt=settings.log_format)
    try:
        with lock_data_dir(settings.data_dir, "predictor"):
            asyncio.run(_run(settings))
    except (CannotStart, OSError, CorruptModel) as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START
    return 0


def first_model(path: Path, trained: Path | None) -> LengthModel:
    """The saved model, else the trained one, else a cold one.

    A damaged saved model is set aside under a name that is logged; a trained one that was asked for and cannot be
    read is an error (CorruptModel, FileNotFoundError).
    """
    try:
        return load(path, RidgeModel.load)
    except FileNotFoundError:
        log.info("no saved model yet", extra=kv(path=path))
    except CorruptModel as error:
        aside = path.with_name(f"{path.name}.corrupt")
        path.replace(aside)
        log.error("saved model damaged: set aside", extra=kv(error=error, aside=aside))
    return load(trained, RidgeModel.load) if trained else RidgeModel.cold(f"ridge-{secrets.token_hex(4)}")


async def _run(settings: PredictorSettings) -> None:
    stop, tls = stop_on_signals(), load_tls(settings.tls_dir, "predictor")
    path = settings.data_dir / "model.npz"
    model = first_model(path, settings.model)
    model.scale = settings.scale
    server = PredictorServer(model)
    checkpointer = Checkpointer(server, path, outcomes=settings.save_outcomes, seconds=settings.save_seconds)
    log.info("model ready", extra=kv(version=model.version))
    probes = Probes(settings.probes, lambda: "draining" if stop.is_set() else None)
    probes.start()
    saving = asyncio.create_task(checkpointer.run())

    async def drain() -> None:
        server.close_streams()

    def register(grpc_server: grpc.aio.Server) -> None:
        add_PredictorServicer_to_server(server, grpc_server)

    names = ("weft.v1.Predictor",)
    try:
        await serve(register, listen=settings.listen, names=names, stop=stop, probes=probes, drain=drain, tls=tls)
    finally:
        checkpointer.close()
        await saving
        server.close()
        probes.close()

"""Retraining beside the serving process: starts `weft_predictor retrain`, and offers what it has written."""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

from weft.files import sync_folder
from weft.telemetry.logs import kv
from weft_predictor import metrics
from weft_predictor.checkpoint import load
from weft_predictor.core.promotion import PromotedModel
from weft_predictor.core.retraining import Retraining, TrainingSet
from weft_predictor.core.ridge_model import RidgeModel
from weft_predictor.encoder_files import read_model
from weft_predictor.errors import CorruptModel, PredictorError
from weft_predictor.models import NETWORKS, SAVED, offer
from weft_predictor.samples import encode_samples
from weft_predictor.server import PredictorServer

CHECK_SECONDS = 5.0
UNFINISHED = ".unfinished"  # in NETWORKS: what a training writes; one that was cut off is removed by the next
WALL_SECONDS_PER_CPU_SECOND = 20.0  # at the lowest priority beside busy processes
log = logging.getLogger(__name__)


class Retrainer:
    """One training at a time. `mounted`: the folder of --model, whose network may be the served one."""

    def __init__(
        self,
        server: PredictorServer,
        model: PromotedModel,
        retraining: Retraining,
        data_dir: Path,
        mounted: Path | None,
    ) -> None:
        self._server, self._model, self._retraining = server, model, retraining
        self._networks, self._saved, self._mounted = data_dir / NETWORKS, data_dir / SAVED, mounted

    async def run(self) -> None:
        """Until cancelled, which ends a training that runs."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check_due()

    async def check_due(self) -> None:
        """Train where that is due, and offer the result. What fails is logged and counted."""
        if (job := await self._server.in_turn(self._retraining.due)) is None:
            return
        before, outcome = _children_cpu_s(), "failed"
        try:
            outcome = await self._train(job)
        except (PredictorError, OSError) as error:
            log.error("network not retrained", extra=kv(network=job.network, error=type(error).__name__, detail=error))
        cpu_s = _children_cpu_s() - before
        metrics.RETRAININGS.labels(outcome).inc()
        metrics.RETRAINING_CPU.inc(cpu_s)
        log.info("retraining ended", extra=kv(network=job.network, result=outcome, cpu_s=round(cpu_s, 1)))
        await self._server.in_turn(partial(self._retraining.ended, cpu_s, out_of_time=outcome == "out_of_time"))

    async def _train(self, job: TrainingSet) -> str:
        out = self._networks / UNFINISHED
        await asyncio.to_thread(_make_empty, out)
        own = self._networks / job.network
        code, words = await self._run_process(own if own.is_dir() else self._mounted or own, out, job)
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "out_of_time"
        if code:
            raise CorruptModel(f"exit code {code}: {words}")
        candidate = await asyncio.to_thread(read_model, out)
        folder = self._networks / candidate.family
        if not await self._server.in_turn(partial(self._retraining.accepts, job.network)):
            return "superseded"
        await asyncio.to_thread(self._keep, out, folder)
        await self._server.in_turn(partial(offer, self._model, candidate))
        return "offered"

    async def _run_process(self, network: Path, out: Path, job: TrainingSet) -> tuple[int, str]:
        """The exit code and the last words."""
        command = (sys.executable, "-m", "weft_predictor", "retrain", network, job.network, out, int(job.cpu_s))
        child = await asyncio.create_subprocess_exec(
            *map(str, command),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(WALL_SECONDS_PER_CPU_SECOND * job.cpu_s):
                _, errors = await child.communicate(await asyncio.to_thread(encode_samples, job.samples))
        except TimeoutError:
            return -signal.SIGKILL, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        return await child.wait(), errors.decode(errors="replace").strip().rpartition("\n")[2][-500:]

    def _keep(self, out: Path, folder: Path) -> None:
        """Give a finished network its name. Others stay only where they serve or are saved: three folders at most."""
        needed = {UNFINISHED, *self._needed()}
        for other in list(folder.parent.iterdir()):
            if other.name not in needed:
                shutil.rmtree(other)
        out.replace(folder)
        sync_folder(folder.parent)

    def _needed(self) -> set[str]:
        """The networks of what serves and of what is saved."""
        served = self._model.served
        names = {served.featurizer.name} if isinstance(served, RidgeModel) else set[str]()
        with contextlib.suppress(FileNotFoundError, CorruptModel):
            names.add(load(self._saved, RidgeModel.features_of))
        return names


def _make_empty(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _children_cpu_s() -> float:
    """Of all children that have ended: trainings are the only ones."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""Retraining with its real process: what it writes is offered, and what goes wrong there stays there."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.waiting import eventually
from weft_predictor.checkpoint import save
from weft_predictor.core import AnsweredIds, PromotedModel, Retraining, TrainingSet
from weft_predictor.encoder_files import SIZES, read_files, read_model, write_files
from weft_predictor.encoder_training import files_of, from_scratch
from weft_predictor.models import NETWORKS, SAVED, first_models
from weft_predictor.retrainer import Retrainer
from weft_predictor.server import PredictorServer

TEXTS = ("name a bird", "write an essay on birds")


class DueNow(Retraining):
    """Trains whenever it is looked at."""

    def __init__(self, model: PromotedModel, samples: list[AnsweredIds], cpu_s: float = 60.0) -> None:
        super().__init__(model, 0.1)
        self._given, self._cpu_s, self.ends = samples, cpu_s, list[tuple[float, bool]]()

    def due(self) -> TrainingSet | None:
        return TrainingSet(self._model.served.featurizer.name, self._given, self._cpu_s)

    def ended(self, cpu_s: float, *, out_of_time: bool) -> None:
        self.ends.append((cpu_s, out_of_time))


async def training_runs() -> bool:
    """Whether this process has a child that trains."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return any(b"weft_predictor\0retrain" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)


@pytest.fixture
def mounted(tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(SIZES, "tiny", (1, 2, 16, 32))
    start = from_scratch("tiny", TEXTS, range(10, 110, 10), 0)
    write_files(tmp_path / "mounted", files_of(start, start.weights))
    return tmp_path / "mounted"


@pytest.fixture
def retrainer(mounted, tmp_path):
    model = PromotedModel(read_model(mounted), lambda _: None)
    server = PredictorServer(model)
    tokenize = model.served.featurizer.tokenize
    samples = [AnsweredIds(np.array(tokenize(TEXTS[i % 2]), np.int32), "m", 5 + 90 * (i % 2) + i) for i in range(100)]
    retraining = DueNow(model, samples)
    yield Retrainer(server, model, retraining, tmp_path, mounted), model, retraining
    server.close()


@pytest.mark.slow
async def test_a_trained_network_is_offered_kept_by_name_and_found_after_a_restart(retrainer, tmp_path, mounted):
    it, model, retraining = retrainer
    await it.check_due()
    first = model.candidate
    assert first is not None
    ((cpu_s, out_of_time),) = retraining.ends
    assert not out_of_time
    assert cpu_s > 0.1
    model.served, model.candidate = first, None  # promoted
    save(tmp_path / SAVED, model.save())
    served, candidate = first_models(tmp_path, None)
    assert (served.version, candidate) == (first.version, None)
    for _ in range(3):  # each is promoted in turn; the saved one and the served one stay
        await it.check_due()
        model.served, model.candidate = model.candidate, None
    assert {first.family, model.served.family} <= {file.name for file in (tmp_path / NETWORKS).iterdir()}
    assert len(list((tmp_path / NETWORKS).iterdir())) <= 3
    assert first_models(tmp_path, mounted)[0].version == first.version


async def test_a_training_beyond_its_time_a_lost_network_and_an_unwritable_folder_leave_the_model_as_it_is(
    retrainer, tmp_path, mounted, caplog
):
    it, model, retraining = retrainer
    retraining._cpu_s = 0.0
    await it.check_due()
    assert retraining.ends[-1][1]
    retraining._cpu_s = 60.0
    shutil.move(mounted / "model.safetensors", mounted / "gone")
    await it.check_due()
    (failure,) = caplog.records
    assert failure.message == "network not retrained"
    assert "model.safetensors" in str(failure.kv["detail"])
    shutil.rmtree(tmp_path / NETWORKS)
    (tmp_path / NETWORKS).write_text("no folder")
    await it.check_due()
    assert [out_of_time for _, out_of_time in retraining.ends] == [True, False, False]
    assert model.candidate is None


async def test_the_process_ends_with_the_task_that_started_it(retrainer):
    it, _, _ = retrainer
    task = asyncio.create_task(it.check_due())
    await eventually(training_runs)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await training_runs()


def test_a_process_whose_parent_has_gone_trains_nothing(mounted, tmp_path):
    name = read_files(mounted).name
    command = [sys.executable, "-m", "weft_predictor", "retrain", mounted, name, tmp_path / "out", "60", "1"]
    ended = subprocess.run(command, input=b"", capture_output=True)
    assert ended.returncode == 1
    assert b"the parent is gone" in ended.stderr

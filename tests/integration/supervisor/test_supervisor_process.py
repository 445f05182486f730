"""The supervisor as a process, with the real predictor process beside it and a scheduler played by the test."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from harness.grpc_server import listening
from harness.ports import free_addresses, free_port
from harness.processes import started
from harness.waiting import PATIENCE_S, soon
from tests.integration.supervisor.conftest import FakeScheduler, spec_of
from weft.domain.ids import NEVER, RunnerId
from weft.domain.request import FinishReason, Outcome, OutcomeAck, OutcomeReport
from weft.domain.routes import Keys
from weft.domain.runner import RunnerFigures, RunnerReport, SchedulerHello, SequenceState, SupervisorHello
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR
from weft.wire.codec.scheduling import outcome_bytes
from weft.wire.streams import ClientStream, channel
from weft.wire.v1 import predictor_pb2
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorStub
from weft.wire.v1.scheduler_pb2_grpc import add_SchedulerServicer_to_server
from weft.wire.v1.supervisor_pb2_grpc import AdminStub, SupervisorStub


def process(module: str, data: Path, *flags: str) -> AbstractContextManager[subprocess.Popen[str]]:
    own = ("--data-dir", str(data), "--probes", free_addresses(1)[0])
    return started(sys.executable, "-m", module, *own, *flags, stderr=subprocess.PIPE, text=True)


@pytest.fixture
async def scheduler():
    servicer = FakeScheduler()
    async with listening(lambda server: add_SchedulerServicer_to_server(servicer, server)) as servicer.address:
        yield servicer


def supervisor(data: Path, port: int, scheduler, predictor_port: int):
    return process(
        "weft_supervisor",
        data,
        *("--listen", f"127.0.0.1:{port}", "--scheduler", scheduler.address),
        *("--predictor", f"127.0.0.1:{predictor_port}"),
    )


async def acknowledged(scheduler: FakeScheduler, request_id: str) -> None:
    record = outcome_bytes(
        Outcome(request_id, "acme/p", "acme", "acme/upper", "", 1, 10, FinishReason.EOS, 1_700_000_000_000)
    )
    scheduler.send(OutcomeReport(request_id, "acme/p", "", 10, False, record))
    while request_id not in (await scheduler.next(OutcomeAck)).request_ids:
        pass


async def predicted(predictor: PredictorStub, *request_ids: str) -> None:
    items = [
        predictor_pb2.PredictItem(request_id=r, prompt_text="hello there", model_name="acme/upper") for r in request_ids
    ]
    await predictor.Predict(predictor_pb2.PredictRequest(items=items), wait_for_ready=True)


async def learned(predictor: PredictorStub, outcomes: int) -> None:
    """Poll until the model has learned `outcomes` outcomes, by its version."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await predictor.Predict(predictor_pb2.PredictRequest(), wait_for_ready=True)
            if answer.model_version.endswith(f"+{outcomes}"):
                return


@pytest.mark.slow
async def test_outcomes_survive_kill_nine_reach_the_predictor_and_runners_come_back(tmp_path, scheduler):
    port, predictor_port = free_port(), free_port()
    sequence = SequenceState("r", NEVER, "g", "", 1, 16, 1)
    hello = (spec_of(RunnerId("a", "1")), RunnerReport(1, True, RunnerFigures(3, 1), [sequence]))
    with process("weft_predictor", tmp_path / "p", "--listen", f"127.0.0.1:{predictor_port}"):
        async with channel(f"127.0.0.1:{port}") as opened, channel(f"127.0.0.1:{predictor_port}") as to_predictor:
            registered = asyncio.Event()
            runner = ClientStream(
                "supervisor",
                SupervisorStub(opened).Runner,
                hello=lambda: map(RUNNER_TO_SUPERVISOR.encode, hello),
                on_message=lambda _message: registered.set(),
            )
            running = asyncio.create_task(runner.run())
            with supervisor(tmp_path / "s", port, scheduler, predictor_port) as first:
                await soon(registered.wait())
                merged = await scheduler.report_with(lambda m: m.reports)
                assert [s.request_id for s in merged.reports[0].report.sequences] == ["r"]
                scheduler.send(SchedulerHello(9))
                created = await AdminStub(opened).CreateKey(pb.CreateKeyRequest(namespace="acme"))
                await predicted(PredictorStub(to_predictor), "before", "after")
                await acknowledged(scheduler, "before")
                first.kill()
                await asyncio.to_thread(first.wait, PATIENCE_S)
                scheduler.forget()
            with supervisor(tmp_path / "s", port, scheduler, predictor_port) as second:
                assert (await scheduler.next(SupervisorHello)).highest_term == 9
                assert [key.key_id for key in (await scheduler.next(Keys)).keys] == [created.key_id]
                merged = await scheduler.report_with(lambda m: m.reports)
                assert [s.request_id for s in merged.reports[0].report.sequences] == ["r"]
                await acknowledged(scheduler, "before")
                await acknowledged(scheduler, "after")
                await learned(PredictorStub(to_predictor), 2)
                runner.close()
                await running
                second.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(second.wait, PATIENCE_S) == 0
    with sqlite3.connect(tmp_path / "s" / "weft.sqlite") as store:
        assert sorted(store.execute("SELECT request_id FROM outcomes")) == [("after",), ("before",)]
        assert store.execute("SELECT requests FROM usage").fetchall() == [(2,)]


def test_a_database_of_a_newer_version_is_refused_by_name(tmp_path, scheduler):
    with sqlite3.connect(tmp_path / "weft.sqlite") as store:
        store.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        store.execute("INSERT INTO alembic_version VALUES ('9999')")
    with supervisor(tmp_path, free_port(), scheduler, free_port()) as refused:
        _, log = refused.communicate(timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "9999" in log
    assert "unknown to this version" in log

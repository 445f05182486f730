"""The predictor as its operator meets it: a process with flags, signals and files."""

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from harness.other_constants import command
from harness.ports import free_port
from harness.processes import started
from harness.waiting import PATIENCE_S, eventually
from weft.wire.streams import channel
from weft.wire.v1 import common_pb2
from weft.wire.v1 import predictor_pb2 as pb
from weft.wire.v1.predictor_pb2_grpc import PredictorStub
from weft_predictor.checkpoint import save
from weft_predictor.core import RidgeModel
from weft_predictor.main import main


def predictor(data: Path, port: int, probes: int, *flags: str) -> AbstractContextManager[subprocess.Popen[str]]:
    process = command("weft_predictor", {"weft_predictor.main:WATCH_S": 0.05})
    at = ("--listen", f"127.0.0.1:{port}", "--data-dir", data, "--probes", f"127.0.0.1:{probes}")
    return started(*process, *at, *flags, stderr=subprocess.PIPE, text=True)


async def ask(stub: PredictorStub) -> pb.PredictResponse:
    item = pb.PredictItem(request_id="r", prompt_text="hello there", model_name="acme/upper")
    return await stub.Predict(pb.PredictRequest(items=[item]), wait_for_ready=True, timeout=PATIENCE_S)


async def teach(stub: PredictorStub, *names: str) -> None:
    items = [pb.PredictItem(request_id=name, prompt_text="hello there", model_name="acme/upper") for name in names]
    await stub.Predict(pb.PredictRequest(items=items))
    call = stub.Observe()
    ended = {"completion_tokens": 10, "finish": common_pb2.FINISH_REASON_EOS}
    outcomes = [common_pb2.Outcome(request_id=name, model_name="acme/upper", **ended) for name in names]
    await call.write(pb.ObserveRequest(outcomes=outcomes))
    assert list((await call.read()).request_ids) == list(names)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def test_the_service_is_imported_without_scipy():
    """Training needs it, in a process of its own: half a second and 50 MB."""
    command = [sys.executable, "-c", "import sys, weft_predictor.main; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "weft_predictor.server" in loaded
    assert "scipy" not in loaded


async def test_what_was_learned_survives_sigterm_and_what_was_saved_survives_sigkill(tmp_path):
    port, probes = free_port(), free_port()
    with predictor(tmp_path, port, probes) as process:
        async with channel(f"127.0.0.1:{port}") as opened:
            stub = PredictorStub(opened)
            first = await ask(stub)
            await teach(stub, *(f"r{i}" for i in range(40)))
            assert get(probes, "/readyz") == "ok\n"
            assert 'weft_predictor_outcomes_total{result="learned"} 40.0' in get(probes, "/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    with predictor(tmp_path, port, probes) as process:
        async with channel(f"127.0.0.1:{port}") as opened:
            again = await ask(PredictorStub(opened))
        process.kill()
    assert again.model_version == first.model_version.replace("+0", "+40")
    assert again.items[0].p50_tokens < first.items[0].p50_tokens
    with predictor(tmp_path, port, probes, "--scale", "10"):
        async with channel(f"127.0.0.1:{port}") as opened:
            tenfold = await ask(PredictorStub(opened))
    assert tenfold.model_version == again.model_version + "x10"
    assert tenfold.items[0].p90_tokens == pytest.approx(10 * again.items[0].p90_tokens, abs=10)


async def test_a_damaged_model_is_set_aside_and_service_starts_and_the_data_directory_has_one_owner(tmp_path):
    (tmp_path / "model.npz").write_bytes(b"PK damaged")
    port = free_port()
    with predictor(tmp_path, port, free_port()) as process:
        async with channel(f"127.0.0.1:{port}") as opened:
            assert (await ask(PredictorStub(opened))).model_version.endswith("+0")
        with predictor(tmp_path, free_port(), free_port()) as second:
            _, refusal = second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 2
        assert "is in use by another predictor" in refusal
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert "saved model set aside" in log
    assert {file.name for file in tmp_path.iterdir()} == {"lock", "model.npz.corrupt"}


def test_a_port_in_use_ends_the_start_with_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with predictor(tmp_path, taken.getsockname()[1], free_port()) as process:
            _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2
        assert "cannot start" in log


def test_wrong_settings_are_all_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--scale", "-1", "--listen", "none"])
    assert ended.value.code == 2
    listed = capsys.readouterr().err
    assert "--scale '-1': " in listed
    assert "--listen 'none': " in listed


def test_an_encoder_that_cannot_be_read_ends_the_start_with_2_and_the_reason(tmp_path):
    (tmp_path / "encoder").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "encoder" / name).write_text('{"model_type": "gpt2"}')
    with predictor(tmp_path / "data", free_port(), free_port(), "--model", str(tmp_path / "encoder")) as process:
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "model_type is 'gpt2', not distilbert or bert" in log


async def test_a_model_that_is_mounted_later_is_offered_and_a_damaged_one_refused_while_the_service_answers(tmp_path):
    mounted, port, probes = tmp_path / "mounted.npz", free_port(), free_port()
    save(mounted, RidgeModel.cold("first", dim=1 << 10).save())

    async def counted(result: str) -> bool:
        return f'weft_predictor_models_total{{result="{result}"}} 1.0' in await asyncio.to_thread(
            get, probes, "/metrics"
        )

    with predictor(tmp_path / "data", port, probes, "--model", str(mounted)):
        async with channel(f"127.0.0.1:{port}") as opened:
            stub = PredictorStub(opened)
            assert (await ask(stub)).model_version == "first+0"
            save(mounted, RidgeModel.cold("second", dim=1 << 10).save())
            await eventually(partial(counted, "offered"))
            mounted.write_bytes(b"PK half a model")
            await eventually(partial(counted, "refused"))
            assert (await ask(stub)).model_version == "first+0"

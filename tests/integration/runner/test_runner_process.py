"""The whole process over real sockets: start, serve, report, drain.

A start is most of what a test here costs: what can be asked of a runner that others have asked something of, is.
"""

import asyncio
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import grpc.aio
import pytest

from harness.blobs import check_blobs
from harness.other_constants import NO_OTHERS, command
from harness.ports import free_addresses
from harness.processes import started
from harness.ranks import base_of, settings_of
from harness.runner_peers import Gateway, supervised
from harness.small_runner import SMALL, World
from harness.waiting import PATIENCE_S, soon
from weft.artifacts.blobs import BlobStore
from weft.domain.request import FinishReason, Sampling
from weft.process import lock_data_dir
from weft.wire.v1 import runner_pb2
from weft_runner.errors import StoppedAtStart
from weft_runner.executors import make_executor
from weft_runner.main import main


@dataclass
class Running:
    process: "subprocess.Popen[bytes]"
    address: str
    probes: str

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    async def get(self, path: str) -> tuple[int, str]:
        def read() -> tuple[int, str]:
            try:
                with urlopen(f"http://{self.probes}{path}", timeout=PATIENCE_S) as response:
                    return response.status, response.read().decode()
            except HTTPError as error:
                return error.code, error.read().decode()

        return await asyncio.to_thread(read)


@contextmanager
def running(
    depot_url: str, supervisor: str, base: str, data_dir: Path, *flags: str, **chosen: Any
) -> Iterator[Running]:
    address, probes = free_addresses(2)
    named = {"listen": address, "probes": probes, "supervisor": supervisor, "depot": depot_url, "data-dir": data_dir}
    named |= {"pool": "default/small", "model-name": "small-base", "base-digest": base}
    runner = command("weft_runner", {"weft_runner.main:parse_settings": chosen} if chosen else NO_OTHERS)
    with started(*runner, *(f"--{name}={value}" for name, value in named.items()), *flags) as process:
        yield Running(process, address, probes)


ENDLESS, PAGES = 60_000, 8192  # tokens of an answer that no test waits out; pages for two of them


@pytest.fixture(scope="module")
def long_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The small model, for long answers."""
    world = World(tmp_path_factory.mktemp("long") / "world", {**SMALL, "max_position_embeddings": ENDLESS + 100})
    world.write_base()
    return world


async def test_a_runner_registers_serves_two_adapters_and_drains(long_world, depot, tmp_path):
    base = depot.publish("model", long_world.base)
    adapters = [depot.publish("adapter", long_world.write_adapter(f"served {i}", seed=i)) for i in range(2)]
    async with supervised() as (supervisor, where):
        with running(depot.url, where, base, tmp_path / "data", f"--kv-pages={PAGES}") as runner:
            await supervisor.until(lambda: bool(supervisor.states))
            hello, first = supervisor.hellos[0], supervisor.states[0]
            assert (hello.pool, hello.base_digest, hello.address) == ("default/small", base, runner.address)
            assert hello.max_context_tokens == ENDLESS + 100
            assert 1 <= hello.best_batch <= hello.max_sequences
            assert 0.0 < hello.step_ms_1 < math.inf
            assert 0.0 < hello.step_ms_best < math.inf
            assert hello.prefill_tokens_per_s > 0.0
            assert first.full
            assert not first.ready
            status, reason = await runner.get("/readyz")
            assert (status, "not known" in reason) == (503, True)

            supervisor.order(*adapters, pinned=True)
            await supervisor.until(lambda: supervisor.states[-1].ready)
            state = supervisor.states[-1]
            assert {a.digest: a.tier for a in state.adapters} == dict.fromkeys(adapters, 4)
            assert state.desired_version == 1
            assert await runner.get("/readyz") == (200, "ok\n")

            async with Gateway(runner.address, hello.runner.incarnation) as gateway:
                assert (await gateway.next("ready")).runner == hello.runner
                answers = {}
                for counter, digest in enumerate(("", *adapters), 1):
                    gateway.start(f"r{counter}", [5, 6, 7], counter, adapter=digest)
                    answers[digest], reason = await gateway.answer(f"r{counter}")
                    assert reason is FinishReason.LENGTH
                    assert len(answers[digest]) == 6
                assert len({tuple(tokens) for tokens in answers.values()}) == 3

                await supervisor.until(lambda: supervisor.states[-1].iterations >= 18)
                pinned_pages = supervisor.states[-1].adapter_pages
                assert pinned_pages > 0, "pinned adapters hold what their bytes fill"
                assert supervisor.states[-1].free_pages == PAGES - pinned_pages
                numbers = [s.version for s in supervisor.states]
                assert numbers == sorted(set(numbers))
                beats = supervisor.heartbeats
                await supervisor.until(lambda: supervisor.heartbeats > beats + 1)
                metrics = (await runner.get("/metrics"))[1]
                assert "weft_runner_tokens_total 18.0" in metrics
                assert f"weft_runner_best_batch_sequences {float(hello.best_batch)}" in metrics
                base = 'engine="0",model_name="small-base"'
                assert f"vllm:num_requests_running{{{base}}} 0.0" in metrics
                assert f"vllm:generation_tokens_total{{{base}}} 18.0" in metrics
                assert f"vllm:max_gpu_lora_adapters{{{base}}} {float(hello.max_adapters)}" in metrics
                assert f'vllm:cache_config_info{{block_size="{hello.page_tokens}",engine="0",' in metrics

                gateway.start("long", [3] * 20, 9, max_tokens=ENDLESS, reservation_tokens=ENDLESS)
                await gateway.next("step")
                exiting = asyncio.create_task(runner.stop())
                while (message := await soon(gateway.call.read())).WhichOneof("message") == "step":
                    pass
                assert message.ended.reason == runner_pb2.Ended.DRAINED
                await gateway.next("draining")
                assert await soon(gateway.call.read()) is grpc.aio.EOF
                assert await exiting == 0
                await supervisor.until(lambda: supervisor.states[-1].draining)


def hide_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start from now on cannot import it."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["torch"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    assert (
        b"import of torch halted" in subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).stderr
    )


@pytest.mark.slow
async def test_every_executor_gives_the_same_tokens_over_the_wire_and_a_runner_started_again_is_known(
    new_world, small_config, make_driver, depot, tmp_path, monkeypatch
):
    """The engine's alone on the reference. cuda: under Triton's interpreter, as the environment says. cpu: no torch."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    world = new_world(tmp_path / "narrow", {**small_config, **heads})
    base, digest = depot.publish("model", world.write_base()), depot.publish("adapter", world.write_adapter("a"))
    expected = make_driver(world)
    for key, adapter in (("base", ""), ("adapted", "a")):
        expected.post(expected.request(key, [5, 6, 7], 4, adapter, sampling=Sampling(ignore_eos=True)))
    expected.finish()
    lives = []
    for flags in (("--executor=reference",), ("--executor=cuda", "--dtype=fp32"), ("--executor=cpu", "--dtype=fp32")):
        if flags[0] == "--executor=cpu":
            hide_torch(tmp_path / "site", monkeypatch)
        async with supervised() as (supervisor, where):
            with running(depot.url, where, base, tmp_path / "data", *flags, profile=False) as runner:
                await supervisor.until(lambda: bool(supervisor.states))
                assert supervisor.hellos[0].numerics_class.startswith(flags[0].partition("=")[2])
                lives.append(supervisor.hellos[0].runner)
                supervisor.order(digest)
                async with Gateway(runner.address, lives[-1].incarnation) as gateway:
                    await gateway.next("ready")
                    gateway.start("base", [5, 6, 7], 1, max_tokens=4)
                    gateway.start("adapted", [5, 6, 7], 2, max_tokens=4, adapter=digest)
                    answers = await gateway.answers("base", "adapted")
                    assert answers == {key: expected.answer(key) for key in ("base", "adapted")}
                assert await runner.stop() == 0
    assert len({life.uuid for life in lives}) == 1
    assert len({life.incarnation for life in lives}) == len(lives)


def flipped(data: bytes) -> bytes:
    """One bit of it, in the middle: of a tensor, or of a name."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def cut_short(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


@pytest.mark.slow
async def test_a_runner_finds_what_its_disk_has_damaged_and_answers_as_before(new_world, small_config, depot, tmp_path):
    """Every cached file while it is away, and an adapter's tensors while it serves.

    But the adapters' manifests: what a damaged one does not name is removed, sooner or later than it is asked for.
    """
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # a model that the native kernels compute
    world = new_world(tmp_path / "world", {**small_config, **heads})
    base = depot.publish("model", world.write_base())
    adapters = [depot.publish("adapter", world.write_adapter(f"a{i}", seed=i, rank=4 + i)) for i in range(2)]
    cached, answers = tmp_path / "data" / "blobs" / "sha256", list[dict[str, list[int]]]()

    async def damaged_files(runner: Running) -> float:
        (line,) = re.findall("^weft_runner_corrupt_artifacts_total (.*)$", (await runner.get("/metrics"))[1], re.M)
        return float(line)

    for damage in (None, flipped, cut_short):
        files = [path for path in sorted(cached.iterdir()) if f"sha256:{path.name}" not in adapters] if damage else []
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        before = len(depot.requests)
        async with supervised() as (supervisor, where):
            with running(depot.url, where, base, tmp_path / "data", "--max-adapters=1", profile=False) as runner:
                await supervisor.until(lambda: bool(supervisor.states))
                supervisor.order(*adapters)
                async with Gateway(runner.address, supervisor.hellos[0].runner.incarnation) as gateway:
                    await gateway.next("ready")
                    answers.append({})
                    for counter, digest in enumerate(("", *adapters), 1):
                        gateway.start(f"r{counter}", [5, 6, 7], counter, adapter=digest)
                        answers[-1][digest] = (await gateway.answer(f"r{counter}"))[0]
                    assert await damaged_files(runner) == len(files)
                    asked = sorted(digest.removeprefix("sha256:") for digest in depot.requests[before:])
                    assert not damage or asked == [path.name for path in files], "each once"

                    blobs = BlobStore(cached.parent)  # the other adapter has the only slot
                    tensors = blobs.file(blobs.manifest(adapters[0]), "adapter_model.safetensors")
                    tensors.write_bytes((damage or flipped)(tensors.read_bytes()))
                    gateway.start("again", [5, 6, 7], 9, adapter=adapters[0])
                    assert (await gateway.answer("again"))[0] == answers[0][adapters[0]]
                    assert await damaged_files(runner) == len(files) + 1
                assert await runner.stop() == 0
        check_blobs(blobs)
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(tokens) for tokens in answers[0].values()}) == 3


async def test_while_it_waits_for_its_base_a_runner_is_alive_not_ready_and_stops_when_told(world, depot, tmp_path):
    base = depot.publish("model", world.base)
    depot.refusals = 10_000
    with running(depot.url, "127.0.0.1:1", base, tmp_path / "data") as runner:
        assert await asyncio.to_thread(depot.asked.wait, PATIENCE_S)
        assert await runner.get("/healthz") == (200, "ok\n")
        assert await runner.get("/readyz") == (503, "starting\n")
        assert await runner.stop() == 0


def test_a_runner_that_is_told_to_stop_loads_no_further(world):
    tensors, base = iter(range(100)), base_of({path.name: path for path in world.base.iterdir()})
    with pytest.raises(StoppedAtStart, match=r"stopped before model\.layers\.0"):
        make_executor(settings_of(), replace(base, stopping=lambda: next(tensors) > 2))


async def test_a_supervisor_that_comes_back_is_told_everything_again_and_nothing_is_disturbed(
    long_world, depot, tmp_path
):
    (where,), flags = free_addresses(1), (f"--kv-pages={PAGES}", "--name=pod-7")
    base = depot.publish("model", long_world.base)
    async with AsyncExitStack() as ending:
        runner = ending.enter_context(running(depot.url, where, base, tmp_path / "data", *flags, profile=False))
        async with supervised(where) as (first, _):
            await first.until(lambda: bool(first.states))
            assert (first.hellos[0].name, first.hellos[0].best_batch) == ("pod-7", 0), "not measured"
            first.order(version=3)
            await first.until(lambda: first.states[-1].ready and first.states[-1].desired_version == 3)
            last = first.states[-1]
            gateway = await ending.enter_async_context(Gateway(runner.address, first.hellos[0].runner.incarnation))
            await gateway.next("ready")
            gateway.start("steady", [3, 4], max_tokens=200, reservation_tokens=200)
            await gateway.next("step")
        async with supervised(where) as (second, _):
            await second.until(lambda: bool(second.states))
            assert second.hellos == first.hellos
            told = second.states[0]
            assert told.full
            assert (told.desired_version, told.ready) == (3, True)
            assert told.version > last.version
            tokens = 1
            while not (step := await gateway.next("step")).finish_reasons:
                tokens += len(step.tokens)
            assert tokens + len(step.tokens) == 200


# ---- exit codes


@pytest.mark.slow
@pytest.mark.usefixtures("main_here")
def test_an_address_in_use_an_owned_folder_and_an_unknown_base_have_exit_codes_and_names(depot, tmp_path, capfd):
    def code_of(**changes: str) -> tuple[int, str]:
        listen, probes = free_addresses(2)
        flags = {"listen": listen, "probes": probes, "depot": depot.url}
        flags |= {"supervisor": "127.0.0.1:1", "data-dir": str(tmp_path / "data"), "pool": "a/b"}
        flags["base-digest"] = "sha256:" + "0" * 64
        code = main([f"--{name}={value}" for name, value in (flags | changes).items()])
        return code, capfd.readouterr().err

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for flag in ("listen", "probes"):
            code, text = code_of(**{flag: f"127.0.0.1:{taken.getsockname()[1]}"})
            assert (code, "AddressInUse" in text, f"--{flag}" in text) == (2, True, True)
    with lock_data_dir(tmp_path / "data", "runner"):
        code, text = code_of()
    assert (code, "DataDirInUse" in text) == (2, True)
    code, text = code_of()
    assert (code, "ArtifactUnknown" in text) == (1, True)

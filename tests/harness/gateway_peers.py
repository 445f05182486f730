"""The gateway's peers as a test plays them: depot, scheduler, runner, predictor, batch service.

Each records what the gateway says and does what a test says or, on autopilot, the plain thing. Scheduler, runner and
predictor are gRPC servers in the test's event loop; the depot is an HTTP server on loopback over a real blob folder.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from harness.grpc_server import listening
from harness.loopback import LoopbackServer, Request
from harness.waiting import PATIENCE_S
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import FileEntry, build_manifest, hex_of
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import batch_pb2, common_pb2, predictor_pb2, runner_pb2, scheduler_pb2
from weft.wire.v1.batch_pb2_grpc import BatchServicer
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer
from weft.wire.v1.runner_pb2_grpc import RunnerServicer, add_RunnerServicer_to_server
from weft.wire.v1.scheduler_pb2_grpc import SchedulerServicer


class FakeDepot(LoopbackServer):
    """Blobs by digest over HTTP, from a real blob folder."""

    def __init__(self, folder: Path) -> None:
        self.blobs = BlobStore(folder)
        self.asked: list[str] = []
        super().__init__(self._answer)

    def _answer(self, request: Request) -> tuple[int, bytes]:
        digest = request.path.removeprefix("/v1/blobs/")
        self.asked.append(digest)
        found = digest.startswith("sha256:") and len(hex_of(digest)) == 64 and self.blobs.has(digest)
        return (200, self.blobs.read(digest, max_bytes=1 << 26)) if found else (404, b"")

    def add_model(self, files: dict[str, bytes]) -> str:
        entries = [FileEntry(n, hex_of(self.blobs.put(data)), len(data)) for n, data in files.items()]
        manifest = build_manifest("model", entries)
        return self.blobs.put(manifest.to_bytes())


class FakeScheduler(SchedulerServicer):
    """Records what the gateway says; on autopilot assigns every submit to `runner` and acknowledges outcomes."""

    def __init__(self) -> None:
        self.routes = scheduler_pb2.Routes()
        self.fleet = scheduler_pb2.Fleet()
        self.runner: FakeRunner | None = None
        self.autopilot = True
        self.acknowledges = True
        self.counter, self.term = 0, 1
        self.outbox: SendQueue[scheduler_pb2.SchedulerToGateway] = SendQueue()
        self.inbox: asyncio.Queue[scheduler_pb2.GatewayToScheduler] = asyncio.Queue()
        self.outcomes: dict[str, common_pb2.Outcome] = {}
        self.limit_reports: list[scheduler_pb2.LimitReport] = []
        self.streams = 0

    async def Gateway(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        self.outbox = SendQueue()
        if self.routes.version:
            self.outbox.put(scheduler_pb2.SchedulerToGateway(routes=self.routes))
        async for message in serve_stream(request_iterator, context, self.outbox, self._take):
            yield message

    def _take(self, message: scheduler_pb2.GatewayToScheduler) -> None:
        self.inbox.put_nowait(message)
        if message.HasField("outcome_report"):
            report = message.outcome_report
            outcome = common_pb2.Outcome.FromString(report.record)
            known = self.outcomes.setdefault(report.request_id, outcome)
            assert known == outcome, "a second, different outcome"
            if self.acknowledges:
                self.send(outcome_ack=scheduler_pb2.OutcomeAck(request_ids=[report.request_id]))
        if message.HasField("limit_report"):
            self.limit_reports.append(message.limit_report)
        if self.autopilot and message.HasField("fleet_query"):
            self.send(fleet=self.fleet)
        if self.autopilot and message.HasField("submit"):
            self.assign(message.submit.request_id)
        if self.autopilot and message.HasField("failed"):
            self.assign(message.failed.request_id)

    def send(self, **message: Any) -> None:
        self.outbox.put(scheduler_pb2.SchedulerToGateway(**message))

    def epoch(self) -> common_pb2.Epoch:
        return common_pb2.Epoch(term=self.term, counter=self.counter)

    def assign(self, request_id: str, runner: "FakeRunner | None" = None) -> common_pb2.Epoch:
        target = runner or self.runner
        assert target
        self.counter += 1
        at = {"runner": target.id, "address": target.address, "numerics_class": f"class of {target.id.uuid}"}
        self.send(assign=scheduler_pb2.Assign(request_id=request_id, epoch=self.epoch(), reservation_tokens=8, **at))
        return self.epoch()

    def send_routes(self, routes: scheduler_pb2.Routes) -> None:
        self.routes = routes
        self.send(routes=routes)

    async def next(self, kind: str) -> Any:
        return await next_of(self.inbox, kind)


async def next_of(inbox: "asyncio.Queue[Any]", kind: str) -> Any:
    """Return the next message of that kind; others before it are passed over."""
    async with asyncio.timeout(PATIENCE_S):
        while (message := await inbox.get()).WhichOneof("message") != kind:
            pass
        return getattr(message, kind)


class FakeRunner(RunnerServicer):
    """Records what the gateway says; on autopilot answers every Start with `answer`, a token per step."""

    def __init__(self, uuid: str) -> None:
        self.id = common_pb2.RunnerId(uuid=uuid, incarnation=f"{uuid}-1")
        self.address = ""
        self.autopilot = True
        self.answer: Callable[[runner_pb2.Start], Sequence[int]] = lambda _: ()
        self.reused: Callable[[runner_pb2.Start], int] = lambda _: 0  # tokens of the prompt
        self.state: Callable[[runner_pb2.Start], bytes] = lambda _: b""
        self.outboxes: list[SendQueue[runner_pb2.RunnerToGateway]] = []
        self.inbox: asyncio.Queue[runner_pb2.GatewayToRunner] = asyncio.Queue()
        self.iteration = 0
        self.closed = 0  # sessions that have ended
        self.silent = False

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        outbox: SendQueue[runner_pb2.RunnerToGateway] = SendQueue()
        self.outboxes.append(outbox)
        try:
            async for message in serve_stream(request_iterator, context, outbox, self._take, joins=True):
                yield message
        finally:
            self.closed += 1

    def _take(self, message: runner_pb2.GatewayToRunner) -> None:
        self.inbox.put_nowait(message)
        if message.HasField("hello") and not self.silent:
            self.send(ready=runner_pb2.SessionReady(runner=self.id))
        if self.autopilot and message.HasField("start"):
            self.answer_whole(message.start)

    def send(self, **message: Any) -> None:
        self.outboxes[-1].put(runner_pb2.RunnerToGateway(**message))

    def answer_whole(self, start: runner_pb2.Start) -> None:
        done = len(start.emitted)
        if start.sampling.pooling and (state := self.state(start)):
            self.send(pooled_state=runner_pb2.PooledState(request_id=start.request_id, epoch=start.epoch, vector=state))
        tokens = list(self.answer(start))[: start.max_tokens]
        for position in range(done, len(tokens)):
            self.step(start, position, [tokens[position]])
        ends = common_pb2.FINISH_REASON_LENGTH if len(tokens) == start.max_tokens else common_pb2.FINISH_REASON_EOS
        self.step(start, len(tokens), [], ends)

    def step(
        self, start: runner_pb2.Start, position: int, tokens: Sequence[int], finish: Any = 0, doublings: int = 0,
        draft_use: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.iteration += 1
        logprobs = [likely(start, position + i, token) for i, token in enumerate(tokens) if start.sampling.logprobs]
        step = runner_pb2.Step(
            iteration=self.iteration, request_ids=[start.request_id], terms=[start.epoch.term],
            counters=[start.epoch.counter], positions=[position], tokens=tokens, token_counts=[len(tokens)],
            finish_reasons=[finish], doublings=[doublings],
            logprobs=[runner_pb2.SequenceLogprobs(tokens=logprobs)],
            cached_tokens=[0 if position else self.reused(start)],
            accepted_draft_tokens=draft_use[:1], rejected_draft_tokens=draft_use[1:],
        )  # fmt: skip
        self.send(step=step)

    async def next(self, kind: str) -> Any:
        return await next_of(self.inbox, kind)

    def break_sessions(self) -> None:
        """End every stream at once, as if the process died."""
        for outbox in self.outboxes:
            outbox.close()


def likely(start: runner_pb2.Start, position: int, token: int) -> runner_pb2.TokenLogprob:
    """Return by position what was chosen, and with it as many alternatives as were asked for, the chosen one first."""
    own = -position / 8
    top = range(start.sampling.top_logprobs)
    return runner_pb2.TokenLogprob(
        logprob=own, top_tokens=[token + i for i in top], top_logprobs=[own - i / 2 for i in top]
    )


class FakePredictor(PredictorServicer):
    """Predicts 7 and 21 for everything; can be held up to see what gathers."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.texts: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.fails = False

    async def Predict(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.batches.append([item.request_id for item in request.items])
        self.texts += [item.prompt_text for item in request.items]
        await self.go.wait()
        if self.fails:
            await context.abort(grpc.StatusCode.INTERNAL, "no model")
        items = [
            predictor_pb2.Prediction(request_id=i.request_id, p10_tokens=3, p50_tokens=7, p90_tokens=21, p99_tokens=40)
            for i in request.items
        ]
        return predictor_pb2.PredictResponse(items=items, model_version="v1")


class FakeBatch(BatchServicer):
    """Files in memory, one batch's answer as a test sets it, and the stream of lines as a test gives them out."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[batch_pb2.UploadFileHeader, bytes]] = {}
        self.responses: dict[tuple[str, str], Any] = {}
        self.asked: list[Any] = []  # but for uploads
        self.job = batch_pb2.BatchJob()
        self.job_owner: str | None = None  # None: of whoever asks
        self.refuses: tuple[Any, ...] | None = None  # code, details, trailing metadata
        self.uploading, self.broken_uploads = asyncio.Event(), 0
        self.outbox: SendQueue[batch_pb2.BatchToGateway] = SendQueue()
        self.inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.messages = 0  # with ends of lines
        self.up = asyncio.Event()

    async def UploadFile(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        header, data, whole = None, b"", False
        try:
            async for message in request_iterator:
                header = header or message.header
                self.uploading.set()
                data += message.chunk
                whole = message.HasField("chunk") and not message.chunk
        finally:  # a call that the gateway cancels ends here with or without CancelledError
            self.broken_uploads += not whole
        if not whole:
            await context.abort(grpc.StatusCode.CANCELLED, "the upload broke off")
        await self._refusal(context)  # once everything has come: a status that meets a write is lost in gRPC
        file_id = f"file-{len(self.files)}"
        self.files[file_id] = header, data
        return self._file(file_id)

    async def GetFile(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._file(await self._named(request, context))

    async def DeleteFile(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self._file(await self._named(request, context))
        del self.files[request.file_id]
        return found

    async def ListFiles(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._refusal(context)
        self.asked.append(request)
        own = [file_id for file_id, (header, _) in self.files.items() if header.namespace == request.namespace]
        return batch_pb2.FileList(files=[self._file(file_id) for file_id in own[: request.limit]], has_more=True)

    async def ReadFile(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        _, data = self.files[await self._named(request, context)]
        for start in range(0, len(data), 1 << 20):
            yield batch_pb2.FileChunk(chunk=data[start : start + (1 << 20)])

    async def KeepResponse(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._refusal(context)
        self.responses[request.namespace, request.response_id] = request
        return batch_pb2.KeepResponseAnswer()

    async def GetConversation(self, request: Any, context: Any) -> Any:  # noqa: N802
        bodies, named = list[bytes](), request.response_id
        while named:
            found = await self._response(request.namespace, named, context)
            bodies.insert(0, found.body)
            named = "" if request.alone else found.previous_id
        return batch_pb2.Conversation(bodies=bodies)

    async def DeleteResponse(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._response(request.namespace, request.response_id, context)
        del self.responses[request.namespace, request.response_id]
        return batch_pb2.DeleteResponseAnswer()

    async def _response(self, namespace: str, response_id: str, context: Any) -> Any:
        await self._refusal(context)
        if (found := self.responses.get((namespace, response_id))) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no response {response_id}")
        return found

    async def CreateBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._refusal(context)
        self.asked.append(request)
        if request.input_file_id in self.files:
            await self._named(
                batch_pb2.FileRequest(namespace=request.namespace, file_id=request.input_file_id), context
            )
        return self.job

    async def GetBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self._owns_job(request):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no batch with the id {request.batch_id!r}")
        await self._refusal(context)
        self.asked.append(request)
        return self.job

    CancelBatch = GetBatch  # type: ignore[assignment]

    async def ListBatches(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._refusal(context)
        self.asked.append(request)
        return batch_pb2.BatchList(batches=[self.job] if self._owns_job(request) else [], has_more=False)

    def _owns_job(self, request: Any) -> bool:
        return self.job_owner in (None, request.namespace)

    async def Lines(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.outbox = SendQueue()
        self.up.set()
        async for message in serve_stream(request_iterator, context, self.outbox, self._take):
            yield message

    def run(
        self, *lines: int, body: bytes, namespace: str = "", endpoint: str = "/v1/completions", traceparent: str = ""
    ) -> None:
        """Give lines out, in one message."""
        of = {"batch_id": "batch_1", "namespace": namespace, "endpoint": endpoint, "body": body}
        given = [batch_pb2.RunLine(line=line, traceparent=traceparent, **of) for line in lines]
        self.outbox.put(batch_pb2.BatchToGateway(run=batch_pb2.RunLines(lines=given)))

    def cancel(self, line: int) -> None:
        self.outbox.put(batch_pb2.BatchToGateway(cancel=batch_pb2.CancelLines(batch_id="batch_1", lines=[line])))

    async def next(self, kind: str) -> Any:
        """Return the next hello, result or released line; others before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                which, message = await self.inbox.get()
                if which == kind:
                    return message

    def _take(self, envelope: batch_pb2.GatewayToBatch) -> None:
        if envelope.HasField("hello"):
            self.inbox.put_nowait(("hello", envelope.hello))
            return
        self.messages += 1
        for result in envelope.ends.results:
            self.inbox.put_nowait(("result", result))
        for released in envelope.ends.released:
            self.inbox.put_nowait(("released", released))

    async def _named(self, request: Any, context: Any) -> str:
        await self._refusal(context)
        header, _ = self.files.get(request.file_id, (None, b""))
        if header is None or header.namespace != request.namespace:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no file {request.file_id!r}.")
        return request.file_id

    async def _refusal(self, context: Any) -> None:
        if self.refuses:
            await context.abort(*self.refuses)

    def _file(self, file_id: str) -> Any:
        header, data = self.files[file_id]
        about = {"filename": header.filename, "purpose": header.purpose, "bytes": len(data), "created_unix_s": 100}
        return batch_pb2.File(file_id=file_id, **about)


@asynccontextmanager
async def runner_server(runner: FakeRunner) -> AsyncIterator[FakeRunner]:
    async with listening(lambda s: add_RunnerServicer_to_server(runner, s)) as runner.address:
        yield runner

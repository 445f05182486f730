"""Spans of requests that wait for a runner: from Submit, or the end of an epoch, to Assign."""

from collections.abc import Callable

from weft.domain.lru import LruDict
from weft.domain.request import Assign, Cancel, Failed, OutcomeReport, Reject, Submit
from weft.telemetry.tracing import Tracer

MAX_TRACED = 10_000  # requests; those of a gateway that is lost are never ended by name


class QueueSpans:
    """Spans by the scheduler's messages; requests that are not sampled leave no trace here."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float]) -> None:
        self._tracer, self._clock = tracer, clock
        self._traced: LruDict[str, Submit] = LruDict(MAX_TRACED)
        self._waiting: LruDict[str, float] = LruDict(MAX_TRACED)  # request id -> since when it waits

    def received(self, message: object) -> None:
        match message:
            case Submit() if message.traceparent:
                self._traced[message.request_id] = message
                if message.runner is None:
                    self._waiting[message.request_id] = self._clock()
            case Failed(request_id) if request_id in self._traced:
                self._waiting[request_id] = self._clock()
            case Cancel(request_id) | OutcomeReport(request_id):
                self._forget(request_id)
            case _:
                pass

    def sent(self, message: object) -> None:
        match message:
            case Assign(request_id, epoch, runner):
                about = {"weft.runner": runner.uuid, "weft.epoch": f"{epoch.term}.{epoch.counter}"}
                self._record(request_id, about)
            case Reject(request_id, reason):
                self._record(request_id, {}, reason.value)
                self._forget(request_id)
            case _:
                pass

    def _record(self, request_id: str, about: dict[str, str], error: str = "") -> None:
        submit, began = self._traced.get(request_id), self._waiting.pop(request_id, None)
        if submit is None or began is None:
            return
        attributes = {"weft.request_id": request_id, "weft.pool": submit.pool, **about}
        self._tracer.record("queue", submit.traceparent, began, self._clock(), attributes, error)

    def _forget(self, request_id: str) -> None:
        self._traced.pop(request_id, None)
        self._waiting.pop(request_id, None)

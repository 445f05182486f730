"""Kubernetes Events, recorded in parallel to reconciling. People read Events, so no write waits for them.

As in client-go's broadcaster, Events wait in a bounded queue, and one task sends them in order. An equal Event raises
the count of the first. An Event refused by the API server is logged and not sent again.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from weft.clocks import micro_time
from weft.telemetry.logs import kv
from weft_operator.core.actions import RecordEvent
from weft_operator.core.children import MANAGER
from weft_operator.core.resources import API_VERSION
from weft_operator.errors import AlreadyExists, KubernetesError, StaleWrite
from weft_operator.kubernetes.client import EVENTS, MERGE_PATCH, KubeApi

log = logging.getLogger(__name__)

MAX_NOTE_BYTES = 1024  # bytes, by the API
MAX_QUEUED_EVENTS = 4096
MAX_SERIES = 1024  # Events with a remembered count


class EventRecorder:
    """The queue of Events. `record` adds an Event; `run()` sends Events until it is cancelled.

    `lead()` raises LeadershipLost and so ends `run()`. `instance` names this process in each Event.
    """

    def __init__(
        self, api: KubeApi, *, lead: Callable[[], None], write_s: float, instance: str, clock: Callable[[], float]
    ) -> None:
        self._api, self._lead, self._write_s = api, lead, write_s
        self._instance, self._clock = instance, clock
        self._queue: asyncio.Queue[tuple[RecordEvent, float]] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._series: OrderedDict[str, int] = OrderedDict()  # number of recordings, by name of the Event

    def record(self, action: RecordEvent) -> None:
        """Queue an Event with the present time. Beyond `MAX_QUEUED_EVENTS`, it is logged and lost."""
        try:
            self._queue.put_nowait((action, self._clock()))
        except asyncio.QueueFull:
            _log_lost(action, f"{MAX_QUEUED_EVENTS} Events wait already")

    async def run(self) -> None:
        """Send Events until cancelled. Raises LeadershipLost."""
        while True:
            await self.send(*await self._queue.get())

    async def send(self, action: RecordEvent, at: float) -> None:
        """Send an Event of the time `at`. An Event refused by the API server is logged. Raises LeadershipLost."""
        event = event_manifest(action, self._instance, at)
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        try:
            try:
                await self._request("POST", EVENTS.path(namespace), event)
            except AlreadyExists:  # an equal one is there
                series = {"series": {"count": self._count(name), "lastObservedTime": event["eventTime"]}}
                await self._request("PATCH", EVENTS.path(namespace, name), series, content_type=MERGE_PATCH)
        except (KubernetesError, StaleWrite) as error:
            _log_lost(action, str(error))

    async def _request(self, method: str, path: str, body: dict[str, Any], **options: Any) -> None:
        self._lead()
        await self._api.request(method, path, body=body, timeout_s=self._write_s, **options)

    def _count(self, event: str) -> int:
        count = self._series[event] = self._series.pop(event, 1) + 1
        if len(self._series) > MAX_SERIES:
            self._series.popitem(last=False)
        return count


def event_manifest(action: RecordEvent, instance: str, at: float) -> dict[str, Any]:
    """Make the manifest of an Event. Its name is a hash of its content, so an equal Event meets the first."""
    ref, note = action.ref, action.message.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
    content = hashlib.sha256("\0".join((action.uid, action.type, action.reason, note)).encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"namespace": ref.namespace, "name": f"{ref.name}.{content}"},
        "eventTime": micro_time(at),
        "type": action.type,
        "reason": action.reason,
        "action": "Reconcile",
        "note": note,
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": ref.kind,
            "namespace": ref.namespace,
            "name": ref.name,
            "uid": action.uid,
        },
        "reportingController": f"serving.weft.dev/{MANAGER}",
        "reportingInstance": instance,
    }


def _log_lost(action: RecordEvent, error: str) -> None:
    log.warning("an Event is lost", extra=kv(object=str(action.ref), reason=action.reason, error=error))

"""Spans of OpenTelemetry in the processes that requests and batches pass; off where the environment names no collector.

On with `OTEL_EXPORTER_OTLP_ENDPOINT` and extra `tracing`; everything else is the SDK's own variables too: protocol,
headers, `OTEL_TRACES_SAMPLER`. The gateway begins a trace, or continues its client's, and its sampler decides; that of
a batch the batch service begins. Behind them the context is a string in messages, W3C's `traceparent` (Trace Context,
section 3.2), "" for what is not sampled: nothing is recorded for it. Machines have no tracer: shells make spans of
times that machines give.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weft.process import CannotStart
from weft.trust import accept_private_authorities

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span
    from requests import Session

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
Attribute = str | bool | int | float | list[str]


class TracingNotPossible(CannotStart):
    """The environment asks for spans that this installation cannot send."""


class RequestSpan:
    """The span of a request or of a batch that is sampled, from its arrival to its one `end`."""

    def __init__(self, span: "Span") -> None:
        self._span = span
        self.traceparent = _traceparent(span)

    @property
    def trace_id(self) -> str:
        return self.traceparent.split("-")[1]

    def end(self, name: str, attributes: Mapping[str, Attribute | None], error: str = "") -> None:
        """`error`: its code, if the request failed. Attributes that are None are left out."""
        _describe(self._span, attributes, error)
        self._span.update_name(name)
        self._span.end()


class Tracer:
    """The tracer of one process. Any thread may use it; spans leave from a thread of their own."""

    def __init__(self, provider: "TracerProvider", clock: Callable[[], float] = time.monotonic) -> None:
        """Make spans by `clock`, whose times `record` takes."""
        self._provider, self._tracer, self._clock = provider, provider.get_tracer("weft"), clock

    def begin(self, headers: Mapping[str, str], arrived_unix_ms: int) -> RequestSpan | None:
        """The span of a request with these headers (`traceparent`); None: it is not sampled."""
        from opentelemetry.trace import SpanKind

        began_ns = arrived_unix_ms * 1_000_000
        span = self._tracer.start_span("request", _context(headers), SpanKind.SERVER, start_time=began_ns)
        return RequestSpan(span) if span.is_recording() else None

    def record(
        self,
        name: str,
        parent: str,
        began: float,
        ended: float,
        attributes: Mapping[str, Attribute | None] | None = None,
        error: str = "",
    ) -> str:
        """Record an ended span, as a child of the span in `parent`. Return its traceparent for its children."""
        now_ns, now = time.time_ns(), self._clock()
        span = self._tracer.start_span(
            name, _context({"traceparent": parent}), start_time=now_ns - round(1e9 * (now - began))
        )
        _describe(span, attributes or {}, error)
        span.end(now_ns - round(1e9 * (now - ended)))
        return _traceparent(span)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def tracer(component: str) -> Tracer | None:
    """This process's tracer; None: the environment names no collector. Raises TracingNotPossible."""
    if not any(os.environ.get(name) for name in ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter()
    except ImportError as error:
        raise TracingNotPossible("spans are asked for, and extra `tracing` of weft is not installed") from error
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: f"weft-{component}"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


def _exporter() -> "SpanExporter":
    protocol = next((value for name in PROTOCOLS if (value := os.environ.get(name))), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

        return HttpSpanExporter(session=_session())
    raise TracingNotPossible(f"{PROTOCOLS[1]} is {protocol!r}: grpc or http/protobuf")


def _session() -> "Session":
    """Make the exporter's session, with the trusted certificates of Weft's clients."""
    from requests import Session
    from requests.adapters import HTTPAdapter
    from urllib3.util import create_urllib3_context

    class PrivateAuthorities(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            context = accept_private_authorities(create_urllib3_context())
            super().init_poolmanager(*args, **options, ssl_context=context)

    session = Session()
    session.mount("https://", PrivateAuthorities())
    return session


def _context(headers: Mapping[str, str]) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers, Context())


def _traceparent(span: "Span") -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _describe(span: "Span", attributes: Mapping[str, Attribute | None], error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR, error))

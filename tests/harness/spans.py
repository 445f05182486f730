"""A tracer whose spans a test reads."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from weft.telemetry.tracing import Tracer


def in_memory(ratio: float = 0.0) -> tuple[Tracer, InMemorySpanExporter]:
    """Make a tracer that samples this share of the traces that begin here; its clock stands at 100 s."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider, lambda: 100.0), exporter


def traceparent_of(span: ReadableSpan) -> str:
    """Return a span's traceparent as W3C's header has it."""
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

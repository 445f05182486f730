"""Spans of a sequence on a runner: the whole of it, and under it its adapter's load, its prefill and its decode."""

from weft.telemetry.tracing import Tracer
from weft_runner.core.events import SequenceEnded


def record_spans(tracer: Tracer, ended: SequenceEnded, runner: str) -> None:
    """Record the spans of a sequence that has left, if its request is sampled: where it ended, or moved."""
    start, first, scheduled = ended.start, ended.first_token_at, ended.scheduled_at
    if not start.traceparent:
        return
    about = {
        "gen_ai.request.model": start.model_name,
        "gen_ai.usage.input_tokens": len(start.prompt),
        "gen_ai.usage.output_tokens": ended.answer_tokens - len(start.emitted),
        "weft.request_id": start.request_id,
        "weft.epoch": f"{start.epoch.term}.{start.epoch.counter}",
        "weft.adapter": start.adapter or "base",
        "weft.runner": runner,
        "weft.finish": ended.finish.value if ended.finish else "moved",
    }
    parent = tracer.record("sequence", start.traceparent, ended.admitted_at, ended.ended_at, about)
    if ended.joined_at is not None and ended.joined_at > ended.admitted_at:
        tracer.record("adapter_load", parent, ended.admitted_at, ended.joined_at, {"weft.adapter": start.adapter})
    if scheduled is None:
        return
    tracer.record("prefill", parent, scheduled, first or ended.ended_at)
    if first is not None:
        tracer.record("decode", parent, first, ended.ended_at)

"""The span of a sampled request: OpenTelemetry's names, and nothing of prompt or answer."""

from typing import Any

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, openai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from harness.spans import in_memory

from .conftest import World

CONVENTIONS = {
    value
    for module in (gen_ai_attributes, openai_attributes, error_attributes, http_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}
ASKED: Any = {
    "model": "acme/upper", "prompt": "hello", "max_tokens": 30, "seed": -7, "temperature": 0.5, "top_p": 0.9,
    "frequency_penalty": 0.25, "presence_penalty": -0.5, "stop": ["secret stop"], "extra_body": {"top_k": 5},
}  # fmt: skip


async def test_a_span_has_what_was_asked_and_used_and_no_text(world: World) -> None:
    world.gateway.tracer, spans = in_memory(ratio=1.0)
    world.runner.answer = lambda _: world.tokens("dear reader")
    world.runner.reused = lambda _: 1
    client = world.client()
    whole = await client.completions.create(**ASKED)
    chunks = [chunk async for chunk in await client.completions.create(**ASKED, stream=True)]
    await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    await world.settled()
    first, second, plain = spans.get_finished_spans()
    attributes = [dict(span.attributes or {}) for span in (first, second, plain)]
    asked = {
        "gen_ai.request.seed": -7, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5.0, "gen_ai.request.frequency_penalty": 0.25, "gen_ai.request.presence_penalty": -0.5,
        "gen_ai.request.max_tokens": 30,
    }  # fmt: skip
    assert whole.usage
    used = {
        "gen_ai.usage.input_tokens": whole.usage.prompt_tokens, "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": whole.usage.completion_tokens, "gen_ai.usage.reasoning.output_tokens": 0,
        "openai.response.system_fingerprint": whole.system_fingerprint,
    }  # fmt: skip
    for about in attributes[:2]:
        assert {name: about[name] for name in asked | used} == asked | used
    assert len(chunks) > 1
    assert [about["gen_ai.request.stream"] for about in attributes] == [False, True, False]
    waits_s = [about.get("gen_ai.response.time_to_first_chunk") for about in attributes]
    assert (waits_s[0], waits_s[2]) == (None, None)
    assert isinstance(waits_s[1], float)
    assert 0 < waits_s[1] < (second.end_time or 0) / 1e9 - (second.start_time or 0) / 1e9
    assert asked.keys() & attributes[2].keys() == {
        "gen_ai.request.max_tokens", "gen_ai.request.temperature", "gen_ai.request.top_p",
    }  # fmt: skip
    names = {name for about in attributes for name in about if not name.startswith("weft.")}
    assert names <= CONVENTIONS
    assert "gen_ai.conversation.id" not in names
    assert not [about for about in attributes if "secret stop" in str(about) or "dear reader" in str(about)]

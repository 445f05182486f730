"""An object's entries for the scheduler. Pure."""

from dataclasses import fields
from typing import Any

from pydantic.alias_generators import to_camel

from weft.api.servingpool import PAGE_TOKENS, Advanced
from weft.domain.adapter import AdapterVersion, Tier
from weft.domain.model.spec import is_bare
from weft.domain.request import NO_DEFAULTS, SamplingDefaults
from weft.domain.routes import AdapterSpec, PoolSpec
from weft_operator.core.acceptance import AdapterView, PoolFacts
from weft_operator.core.chat_templates import TemplateView
from weft_operator.core.scaling import phase_groups
from weft_operator.core.status import (
    adapter_conditions,
    canary_version,
    earlier_versions,
    has_own_template,
    model_context_tokens,
    observed_generation,
)

# Fields of `advanced` have the same names in the scheduler's entry.
ADVANCED = sorted({field.name for field in fields(PoolSpec)} & Advanced.model_fields.keys())


def pool_entry(view: PoolFacts) -> PoolSpec | None:
    """Make the scheduler's entry of this pool; None: no entry."""
    if view.serving is None or (view.template and view.template.is_held):
        return None
    pool, spec, namespace = view.pool, view.pool.spec, view.pool.meta.ref.namespace
    rest: dict[str, Any] = {name: getattr(spec.advanced, name) for name in ADVANCED} | supplied_template(view.template)
    slo, weights = spec.slo, spec.fairness.weights if spec.fairness else None
    return PoolSpec(
        name=str(pool.meta.ref),
        base_digest=view.serving.digest,
        base_model_name=pool.model_name,
        shared_all="*" in pool.allowed_namespaces,
        shared_namespaces=tuple(sorted({namespace, *pool.allowed_namespaces} - {"*"})),
        tenant_weights=tuple(sorted((weights or {}).items())),
        slo_ttft_s=(slo.ttft_ms or 0) / 1000 if slo else 0.0,
        slo_token_time_s=slo.token_time_ms / 1000 if slo else 0.0,
        slo_reject=slo is not None and slo.admission == "Reject",
        phases=spec.phases.mode.lower(),
        groups=phase_groups(pool),
        created_unix_s=int(pool.meta.created),
        min_runners=view.bounds.min,
        max_runners=view.bounds.max,
        generation=view.bounds.generation,
        idle_s=float(spec.autoscaling.idle_seconds) if spec.autoscaling else 0.0,
        drain_s=float(spec.drain_seconds),
        max_context_tokens=max_context_tokens(view),
        tool_call_parser=spec.model.tool_call_parser or "",
        max_output_tokens=spec.model.max_output_tokens or 0,
        embeds_only=is_bare(view.serving.verdict.get("architecture") or ""),
        sampling_defaults=sampling_defaults(view) if spec.model.generation_defaults == "Honour" else NO_DEFAULTS,
        **rest,
    )


def supplied_template(template: TemplateView | None) -> dict[str, str]:
    """Make the fields of the spec's chat template as it is published; while it is not known, as it was."""
    if template is None:
        return {}
    if template.content:
        return {"chat_template": template.content.digest}
    previous = template.published
    if previous is None or template.fault:
        return {"chat_template_fault": template.fault}
    return {"chat_template": previous.chat_template, "chat_template_fault": previous.chat_template_fault}


def sampling_defaults(view: PoolFacts) -> SamplingDefaults:
    """Read the defaults in the base's generation_config.json."""
    defaults = view.serving.verdict.get("generationDefaults") or {} if view.serving else {}
    return SamplingDefaults(**{field.name: defaults.get(to_camel(field.name)) for field in fields(SamplingDefaults)})


def max_context_tokens(view: PoolFacts) -> int:
    """Return the maximum tokens of prompt and answer together; 0 if unknown.

    The model's positions or a runner's pages bound it. It is published before a runner reports it, so a request for a
    pool at zero already gets an answer of the right length.
    """
    pages, model = view.pool.spec.advanced.kv_pages, model_context_tokens(view)
    return min(model, pages * PAGE_TOKENS) if pages else model


def adapter_entry(view: AdapterView) -> AdapterSpec:
    """Make the scheduler's entry of an adapter: the serving content, or the reason for its absence."""
    adapter, verdict = view.adapter, view.serving.verdict if view.serving else {}
    reason = None if view.serving else next(c for c in adapter_conditions(view) if c.type == "Ready")
    return AdapterSpec(
        uid=adapter.meta.uid,
        namespace=adapter.meta.ref.namespace,
        model_name=adapter.model_name,
        pool=str(view.serving.pool if view.serving else adapter.pool),
        digest=view.serving.digest if view.serving else "",
        rank=int(verdict.get("rank") or 0),
        bytes=int(verdict.get("sizeBytes") or 0),
        pinned=adapter.spec.pinned,
        created_unix_s=int(adapter.meta.created),
        tier=Tier[adapter.spec.tier.upper()],
        reason=reason.reason if reason else "",
        message=reason.message if reason else "",
        version=(view.serving.version or "") if view.serving else "",
        versions=canary_version(view)
        + tuple(
            AdapterVersion(
                v["digest"],
                int(v.get("rank") or 0),
                int(v.get("sizeBytes") or 0),
                v.get("name") or "",
                eos_token_ids=tuple(v.get("eosTokenIds") or ()),
                own_chat_template=has_own_template(adapter, v),
            )
            for v in (earlier_versions(view, view.serving) if view.serving else ())
        ),
        generation=observed_generation(view),
        eos_token_ids=tuple(verdict.get("eosTokenIds") or ()),
        own_chat_template=has_own_template(adapter, verdict),
        **supplied_template(view.template),
    )

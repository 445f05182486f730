"""A plan as people read it: a table of the designs, what was not tried, a picture, the ServingPool to apply."""

from collections.abc import Mapping
from copy import deepcopy
from html import escape
from math import inf
from typing import Any

from weft_sim.planning.designs import MEASURES, Design, PricedKind
from weft_sim.planning.plan import NOT_TRIED, CapacityPlan
from weft_sim.planning.search import Found, Trial

HEAD = ("KINDS", "PROMPT", "TOKEN", "MIXED", "$/HOUR", "KW", "GPUS", "BUSY", "SIMULATED")
UNITS = {"cost": "$/hour", "power": "W", "count": "runners"}
Row = tuple[str, ...]


def rows(plan: CapacityPlan) -> tuple[Row, list[Row]]:
    """Head and rows of the table: each family's smallest design and its quantiles, the smallest first."""
    objectives = [objective.label.upper() for objective in plan.problem.objectives]
    searched = [family_result for family_result in plan.results if family_result.ruled_out is None]
    searched.sort(key=lambda family_result: plan.problem.size(family_result.best.design) if family_result.best else inf)
    return (*HEAD, *objectives, ""), [_row(plan, family_result) for family_result in searched]


def _row(plan: CapacityPlan, family_result: Found) -> Row:
    count = f"{len(family_result.trials)}" + (f" of {family_result.grid}" if family_result.grid else "")
    if family_result.best is None:
        return (family_result.family.name, *[""] * 7, count, *[""] * len(plan.problem.objectives), family_result.reason)
    design, trial = family_result.best.design, family_result.best
    numbers = (str(design.prompts), str(design.tokens), "") if design.family.split else ("", "", str(design.prompts))
    busy = "/".join(f"{share:.0%}" for share in trial.utilization if share)
    mixed = f"up to {trial.most_mixed} mixed at a time" if trial.most_mixed else ""
    return (family_result.family.name, *numbers, *_totals(design), busy, count, *map(seconds, trial.values), mixed)


def _totals(design: Design) -> tuple[str, str, str]:
    watts, gpus = design.total(MEASURES["power"]), design.total(lambda kind: float(kind.gpus))
    return f"{design.total(MEASURES['cost']):.2f}", f"{watts / 1e3:.1f}", f"{gpus:g}"


def answer(plan: CapacityPlan, seed: int) -> list[str]:
    """The design, and whether requests of another seed confirm it."""
    if plan.confirmed is None:
        reasons = [
            f"  {family_result.family.name}: {family_result.reason or 'too many runners'}"
            for family_result in plan.results
        ]
        return ["No design meets the objectives:", *reasons, f"Not tried: {NOT_TRIED}."]
    design, trial = plan.confirmed.design, plan.confirmed
    price, kilowatts, gpus = _totals(design)
    lines = [f"{design.name}: {price} $/hour, {kilowatts} kW, {gpus} GPUs"]
    if plan.enlarged:
        lines.append(f"{plan.enlarged} more than the search found: requests of seed {seed} missed an objective")
    if trial.met:
        measured = ", ".join(_missed_lines(plan, trial))
        lines.append(f"Confirmed with other requests, of seed {seed}: {measured}")
    else:
        lines.append(f"NOT confirmed: requests of seed {seed} miss {trial.missed}")
    simulated = sum(len(family_result.trials) for family_result in plan.results)
    lines.append(f"{simulated} designs of {len(plan.results)} combinations simulated. Not tried: {NOT_TRIED}.")
    if bounded := [family_result.ruled_out for family_result in plan.results if family_result.ruled_out is not None]:
        bounds_text = ", ".join(
            f"{family_bound.family.name} ({plan.problem.size(family_bound):,.5g})" for family_bound in bounded
        )
        lines.append(f"Ruled out by their bounds, at least (in {UNITS[plan.problem.measure]}): {bounds_text}")
    return lines


def _missed_lines(plan: CapacityPlan, trial: Trial) -> list[str]:
    pairs = zip(plan.problem.objectives, trial.values, strict=True)
    return [f"{objective.label} {seconds(value)} (at most {seconds(objective.bound)})" for objective, value in pairs]


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


# ---------------------------------------------------------------- the pool


def pool(plan: CapacityPlan, manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ServingPool of the answer: the manifest's, with its phases, groups and number of runners."""
    assert plan.confirmed is not None
    design = plan.confirmed.design
    object_: dict[str, Any] = deepcopy(dict(manifest)) if manifest is not None else _skeleton(plan)
    spec: dict[str, Any] = object_["spec"]
    spec.pop("autoscaling", None)
    spec["replicas"] = design.runners
    advanced = spec["advanced"] = dict(spec.get("advanced") or {})
    kinds = [(design.family.prompt, design.prompts, "Any")]
    if design.family.token is not None:
        spec["phases"] = {"mode": "Split"}
        if design.family.token != design.family.prompt:
            advanced["kvAcrossClasses"] = True
        kinds = [(design.family.prompt, design.prompts, "Prompt"), (design.family.token, design.tokens, "Token")]
    else:
        spec["phases"] = {"mode": "Unified"}
    groups = spec.pop("runnerGroups", None) or []
    template = next((group["template"] for group in groups if group.get("template")), spec.get("template") or {})
    spec["runnerGroups"] = [
        {
            "name": f"{kind.name.split(',')[0].replace(' ', '-')}-{phase.lower()}",
            "phase": phase,
            "minRunners": count,
            "maxRunners": count,
            **_template(template, kind),
        }
        for kind, count, phase in kinds
    ]
    batch_tokens = design.family.prompt.kind.max_batch_tokens
    advanced["maxBatchTokens"] = batch_tokens
    gpus = design.family.prompt.gpus
    if gpus > 1 and "parallelism" not in spec:
        spec["parallelism"] = {"tensor": gpus}
    return object_


def _template(template: Mapping[str, Any], kind: PricedKind) -> dict[str, Any]:
    """A group's pods: those of the manifest on the kind's nodes."""
    if not kind.product:
        return {"template": dict(template)} if template else {}
    changed: dict[str, Any] = deepcopy(dict(template))
    changed["nodeSelector"] = {**changed.get("nodeSelector", {}), "nvidia.com/gpu.product": kind.product}
    resources = dict(changed.get("resources") or {})
    changed["resources"] = {**resources, "limits": {**resources.get("limits", {}), "nvidia.com/gpu": kind.gpus}}
    return {"template": changed}


def _skeleton(plan: CapacityPlan) -> dict[str, Any]:
    name = plan.problem.model.name
    return {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": "planned", "namespace": "default"},
        "spec": {"model": {"uri": f"hf:{name}" if "/" in name else "file:model"}},
    }


# ---------------------------------------------------------------- the picture

WIDTH, LEFT, ROW, TOP = 760, 190, 26, 44
PROMPT_COLOUR, TOKEN_COLOUR, MIXED_COLOUR = "#4269d0", "#efb118", "#3ca951"


def picture(plan: CapacityPlan) -> str:
    """SVG: of each combination the smallest design, its runners by role, as long as it costs or draws."""
    measure = MEASURES[plan.problem.measure]
    ranked = sorted(
        (family_result for family_result in plan.results if family_result.best is not None),
        key=lambda one: plan.problem.size(_design(one)),
    )
    max_size = max((plan.problem.size(_design(family_result)) for family_result in ranked), default=1.0)
    unit = UNITS[plan.problem.measure]
    parts = [_text(8, 20, f"Smallest design of each combination that meets the objectives, {unit}", 14)]
    for place, family_result in enumerate(ranked):
        y, design, x = TOP + place * ROW, _design(family_result), float(LEFT)
        parts.append(_text(LEFT - 6, y + 14, design.family.name, 11, "end"))
        bars = [(design.prompts, design.family.prompt, PROMPT_COLOUR if design.family.split else MIXED_COLOUR)]
        if design.family.token is not None:
            bars.append((design.tokens, design.family.token, TOKEN_COLOUR))
        for count, kind, colour in bars:
            wide = count * measure(kind) / max_size * (WIDTH - LEFT - 80)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 8}" fill="{colour}"/>')
            parts.append(_text(x + 4, y + 13, str(count), 11) if wide > 20 else "")
            x += wide
        parts.append(_text(x + 5, y + 14, f"{plan.problem.size(design):,.4g}", 11))
    y = TOP + len(ranked) * ROW + 8
    for place, (name, colour) in enumerate(
        (("prompt", PROMPT_COLOUR), ("token", TOKEN_COLOUR), ("mixed", MIXED_COLOUR))
    ):
        parts.append(f'<rect x="{LEFT + 90 * place}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(LEFT + 90 * place + 16, y + 10, name, 11))
    height = y + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *filter(None, parts), "</svg>\n"]
    )


def _design(family_result: Found) -> Design:
    assert family_result.best is not None
    return family_result.best.design


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'

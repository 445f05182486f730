"""`weft describe`: an object's spec, conditions and where runners have it, as text."""

from collections.abc import Iterable, Mapping, Sequence

from weft.domain.text import sanitize
from weft_cli.output import NONE, Object, age, dump, short, table
from weft_cli.runners import RunnerRow


def describe_adapter(obj: Object, runners: Sequence[RunnerRow], now: float, unknown: str = "") -> list[str]:
    """Describe a LoRAAdapter: conditions with advice, and its residency on each runner. `unknown`: why runners are not
    known."""
    status = obj.get("status", {})
    facts = {
        "Model": status.get("modelName", NONE),
        "Digest": status.get("digest", NONE),
        "Rank": status.get("rank", NONE),
        "Alpha": status.get("alpha", NONE),
        "Modules": ", ".join(status.get("targetModules", ())) or NONE,
        "Size": f"{status['sizeBytes']} bytes, {status.get('dtype', '?')}" if "sizeBytes" in status else NONE,
    }
    if eos := status.get("eosTokenIds"):
        facts["Ends with"] = f"{_tokens(eos)}, and the base's"
    if template := _template(obj):
        facts["Template"] = template
    if canary := status.get("canary"):
        facts["Canary"] = _canary(canary, obj["spec"].get("canary", {}))
    digest = status.get("digest")
    rows = [
        (runner.called, at.tier, str(at.running), "loading" if at.loading else at.error or at.shortfall)
        for runner in runners
        for at in runner.adapters
        if at.digest == digest
    ]
    residency = (
        table(("RUNNER", "TIER", "RUNNING", "NOTE"), rows) if rows else [unknown or "no runner has it in memory"]
    )
    contents = [
        (version["digest"], version.get("name", NONE), str(version.get("rank", NONE)), version["publishTime"])
        for version in status.get("versions", ())
    ]
    versions = ["", "Versions:", *_indent(table(("DIGEST", "NAME", "RANK", "PUBLISHED"), contents))] if contents else []
    residence = ["", "On runners:", *_indent(residency)]
    return [*_head(obj, now), *_pairs(facts), *_conditions(obj, now), *versions, *residence]


def _tokens(ids: Iterable[int]) -> str:
    return f"token {' or '.join(map(str, ids))}"


def _canary(status: Object, spec: Object) -> str:
    parts = [f"{status['phase']}, {spec.get('weight', '?')} % of the requests", status.get("digest", "no content yet")]
    if "requests" in status:
        parts.append(
            f"{status['failedRequests']} of {status['requests']} requests failed, "
            f"{status['stableFailedRequests']} of {status['stableRequests']} of the stable content"
        )
    return "; ".join(parts)


def describe_pool(obj: Object, runners: Sequence[RunnerRow], now: float, unknown: str = "") -> list[str]:
    """Describe a ServingPool: conditions with advice, and its runners."""
    status = obj.get("status", {})
    ref = f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"
    adapters = status.get("adapters", {})
    facts = {
        "Model": obj["spec"]["model"].get("name") or obj["metadata"]["name"],
        "Digest": status.get("baseDigest", NONE),
        "Ends with": _tokens(eos) if (eos := status.get("eosTokenIds")) else NONE,
        "Defaults": _defaults(obj),
        "Template": _template(obj) or NONE,
        "Runners": f"{status.get('readyReplicas', 0)} ready of {status.get('desiredReplicas', '?')} desired",
        "Adapters": f"{adapters.get('ready', 0)} ready of {adapters.get('total', 0)}",
    }
    if slo := status.get("slo"):
        facts["SLO"] = (
            f"{slo['attainedPercent']} % of requests (first token {slo['ttftPercent']} %, "
            f"token time {slo['tokenTimePercent']} %)"
        )
    if phases := status.get("phases"):
        counts = ", ".join(f"{phases[role]} {role}" for role in ("prompt", "token", "mixed"))
        facts["Phases"] = f"{counts} ({phases.get('message', '')})"
    pool_runners = [runner for runner in runners if runner.pool == ref]
    rows = [(*runner.row()[:1], *runner.row()[2:], runner.numerics_class) for runner in pool_runners]
    headers = ("RUNNER", "READY", "SEQUENCES", "PAGES", "ADAPTERS", "ROLE", "ADDRESS", "NUMERICS")
    lines = table(headers, rows) if rows else [unknown or "none"]
    return [*_head(obj, now), *_pairs(facts), *_conditions(obj, now), "", "Runners:", *_indent(lines)]


def _template(obj: Object) -> str:
    """Describe whose chat template renders chats; the conditions say whether it does. "" if it is not known."""
    status = obj.get("status", {})
    if supplied := status.get("suppliedChatTemplate"):
        return f"{supplied['from']} of the spec, {supplied['digest']}"
    spec = obj["spec"]["model"] if obj["kind"] == "ServingPool" else obj["spec"]
    chosen = spec.get("chatTemplate", {}).get("from", "Auto")
    if chosen in ("Inline", "ConfigMap"):
        return "none yet"
    origin = status.get("chatTemplate", {}).get("from", "")
    owner = origin if chosen == "Auto" or obj["kind"] == "ServingPool" else chosen
    base = "the base model's" if obj["kind"] == "ServingPool" else "the pool's"
    return {"Adapter": "the adapter's own", "Base": base, "None": "none"}.get(owner, "")


def _defaults(pool: Object) -> str:
    """Describe the defaults of sampling, by the model's generation_config.json."""
    defaults = pool.get("status", {}).get("generationDefaults", {})
    ignored = " (ignored: generationDefaults)" if pool["spec"]["model"].get("generationDefaults") == "Ignore" else ""
    return ", ".join(f"{name} {value}" for name, value in defaults.items()) + ignored if defaults else NONE


def describe_key(obj: Object, now: float) -> list[str]:
    """Describe an APIKey: where its key is, never the key; conditions with advice."""
    status = obj.get("status", {})
    facts = {
        "Key": status.get("keyID", NONE),
        "Secret": status.get("secretName", NONE),
        "Expires": status.get("expiresAt", "never" if "keyID" in status else NONE),
        "Rotated": status.get("lastRotated", NONE),
    }
    return [*_head(obj, now), *_pairs(facts), *_conditions(obj, now)]


def describe_runner(runner: RunnerRow) -> list[str]:
    """Describe a runner: its capacity, and its adapters by tier."""
    facts = {
        "Runner": runner.called,
        "UUID": runner.uuid,
        "Pool": runner.pool,
        "Ready": "draining" if runner.draining else runner.ready,
        "Address": runner.address,
        "Numerics": runner.numerics_class,
        "Sequences": f"{runner.sequences} of {runner.max_sequences}",
        "Role": f"{runner.role}, {runner.pending_prompt_tokens} tokens of prompts to compute",
        "Measured": runner.measured,
        "Pages": f"{runner.used_pages} used of {runner.total_pages}",
    }
    rows = [(short(at.digest), at.tier, str(at.running), at.error or at.shortfall) for at in runner.adapters]
    lines = table(("DIGEST", "TIER", "RUNNING", "NOTE"), rows) if rows else ["none"]
    return [*_pairs(facts), "", f"Adapters (at most {runner.max_adapters} on the device):", *_indent(lines)]


def _head(obj: Object, now: float) -> list[str]:
    meta = obj["metadata"]
    facts = {
        "Name": meta["name"],
        "Namespace": meta["namespace"],
        "Kind": obj["kind"],
        "Age": age(meta["creationTimestamp"], now),
    }
    return [*_pairs(facts), "Spec:", *_indent(dump(obj["spec"], "yaml").splitlines())]


def _conditions(obj: Object, now: float) -> list[str]:
    from weft.api.reasons import advice

    conditions = obj.get("status", {}).get("conditions", ())
    rows = [
        (c["type"], c["status"], c["reason"], age(c["lastTransitionTime"], now), c.get("message", ""))
        for c in conditions
    ]
    lines = table(("TYPE", "STATUS", "REASON", "FOR", "MESSAGE"), rows) if rows else ["none yet"]
    bad = dict.fromkeys(c["reason"] for c in conditions if c["status"] != "True" and c["type"] != "Progressing")
    todo = [f"{reason}: {text}" for reason in bad if (text := advice(reason, obj["kind"]))]
    return ["", "Conditions:", *_indent(lines), *(["", "What to do:", *_indent(todo)] if todo else [])]


def _pairs(facts: Mapping[str, object]) -> list[str]:
    return [f"{name + ':':<12} {sanitize(str(value))}" for name, value in facts.items()]


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]

"""How things are printed: kubectl's tables, JSON and YAML on standard output, messages on standard error."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from weft.domain.text import sanitize

Object = Mapping[str, Any]
SHORT_DIGEST = 12
NONE = "<none>"


def say(text: str, end: str = "\n") -> None:
    """Lines on standard output."""
    sys.stdout.write(_safe(text) + end)
    sys.stdout.flush()


def note(text: str, mark: str = "") -> None:
    """Lines on standard error: for people, not for pipes. `mark` goes before them as it is, with its colours."""
    sys.stderr.write(mark + _safe(text) + "\n")
    sys.stderr.flush()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> list[str]:
    """Columns as kubectl sets them: three spaces apart, nothing after the last."""
    lines = [tuple(headers), *(tuple(map(sanitize, row)) for row in rows)]
    wide = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    wide = [max(pair) for pair in zip(wide, widths, strict=True)] if widths else wide
    return ["   ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip() for line in lines]


def dump(value: Any, form: str) -> str:
    """A value as JSON or YAML. What no terminal should get is escaped as the form does it: the value stays."""
    text = _dumped(value, form, as_it_is=True)
    return text if _safe(text) == text else _dumped(value, form, as_it_is=False)


def _dumped(value: Any, form: str, *, as_it_is: bool) -> str:
    if form == "json":
        return json.dumps(value, indent=2, ensure_ascii=not as_it_is)
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=as_it_is).rstrip()


def _safe(text: str) -> str:
    """What tenants wrote comes to an operator's terminal, where an escape code would be a command."""
    return "\n".join("\t".join(map(sanitize, line.split("\t"))) for line in text.split("\n"))


def adapter_headers(*, wide: bool) -> tuple[str, ...]:
    return ("NAME", "POOL", "READY", "REASON", "RUNNERS", "DIGEST", *(("RANK", "MODEL") if wide else ()), "AGE")


def ready_runners(pools: Iterable[Object]) -> dict[str, int]:
    """Ready runners by `namespace/name` of their pool."""
    named = {f"{pool['metadata']['namespace']}/{pool['metadata']['name']}": pool.get("status", {}) for pool in pools}
    return {name: status.get("readyReplicas", 0) for name, status in named.items()}


def adapter_row(obj: Object, now: float, runners: Mapping[str, int], *, wide: bool) -> tuple[str, ...]:
    """A LoRAAdapter's columns. `runners`: ready ones by pool; RUNNERS are those of them that serve the adapter."""
    spec, status, meta = obj["spec"], obj.get("status", {}), obj["metadata"]
    pool = f"{spec['poolRef'].get('namespace') or meta['namespace']}/{spec['poolRef']['name']}"
    serving = max(0, runners.get(status.get("pool", pool), 0) - status.get("unavailableRunners", 0))
    ready = condition(obj, "Ready")
    more = (str(status.get("rank", NONE)), str(status.get("modelName", NONE))) if wide else ()
    return (
        meta["name"],
        pool,
        ready.get("status", "Unknown"),
        ready.get("reason", NONE),
        str(serving if "digest" in status else 0),
        short(status.get("digest")),
        *more,
        age(meta["creationTimestamp"], now),
    )


def pool_headers(*, wide: bool) -> tuple[str, ...]:
    return ("NAME", "MODEL", "READY", "AVAILABLE", "REASON", "ADAPTERS", *(("DIGEST", "URI") if wide else ()), "AGE")


def pool_row(obj: Object, now: float, *, wide: bool) -> tuple[str, ...]:
    """A ServingPool's columns. READY is ready/wanted runners, ADAPTERS ready/all."""
    spec, status, meta = obj["spec"], obj.get("status", {}), obj["metadata"]
    available, adapters = condition(obj, "Available"), status.get("adapters", {})
    more = (short(status.get("baseDigest")), spec["model"]["uri"]) if wide else ()
    return (
        meta["name"],
        spec["model"].get("name") or meta["name"],
        f"{status.get('readyReplicas', 0)}/{spec.get('replicas', 1)}",
        available.get("status", "Unknown"),
        available.get("reason", NONE),
        f"{adapters.get('ready', 0)}/{adapters.get('total', 0)}",
        *more,
        age(meta["creationTimestamp"], now),
    )


def condition(obj: Object, kind: str) -> Mapping[str, str]:
    """One condition; empty when it was never written."""
    found = (c for c in obj.get("status", {}).get("conditions", ()) if c["type"] == kind)
    return next(found, {})


def short(digest: str | None) -> str:
    """The first twelve hex digits."""
    return digest.partition(":")[2][:SHORT_DIGEST] if digest else NONE


def age(created: str, now: float) -> str:
    """How long ago, as kubectl says it: 12s, 5m, 3h, 4d."""
    seconds = max(int(now - datetime.fromisoformat(created).timestamp()), 0)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size or (unit != "m" and seconds >= size):
            return f"{seconds // size}{unit}"
    return f"{seconds}s"

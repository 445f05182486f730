"""A check that the cluster's CustomResourceDefinitions have every field of this version's schema.

The API server silently drops a field missing from a definition. Definitions may be older than the operator: with
`crds.install: false` they are applied by hand. The check reads the group's OpenAPI document. Every authenticated user
may read it, so the operator needs no rights on CustomResourceDefinitions. A difference is logged and stops nothing.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Gauge

from weft.api.crd import crds
from weft.api.meta import GROUP, VERSION
from weft.telemetry.logs import kv
from weft_operator.errors import KubernetesError, ObjectNotFound
from weft_operator.kubernetes.client import KubeApi

log = logging.getLogger(__name__)

PATH = f"/openapi/v3/apis/{GROUP}/{VERSION}"
MAX_NAMED_FIELDS = 20  # fields in the log line
PERIOD_S = 300.0  # between two checks, while fields are missing

Schema = Mapping[str, Any]


async def check_crds(api: KubeApi, missing: Gauge) -> None:
    """Compare, log and count the cluster's missing fields; repeat every PERIOD_S until none is missing."""
    previous: list[str] | None = None
    while True:
        try:
            fields = missing_fields(await api.request("GET", PATH))
        except (KubernetesError, ObjectNotFound) as error:
            log.warning("the CustomResourceDefinitions cannot be checked", extra=kv(error=str(error)))
            return
        missing.set(len(fields))
        if fields and fields != previous:
            named = ", ".join([*fields[:MAX_NAMED_FIELDS], *(["..."] if len(fields) > MAX_NAMED_FIELDS else [])])
            message = (
                "the cluster's CustomResourceDefinitions lack fields, which are dropped: apply those of this version"
            )
            log.warning(message, extra=kv(count=len(fields), fields=named))
        if not fields:
            return
        previous = fields
        await asyncio.sleep(PERIOD_S)


def missing_fields(document: Mapping[str, Any]) -> list[str]:
    """List the fields of this version, like `KIND.spec.lora.maxRank`, missing from a group's OpenAPI document."""
    there = {_kind(schema): schema for schema in (document.get("components") or {}).get("schemas", {}).values()}
    lacking = list[str]()
    for crd in crds().values():
        kind, (version,) = crd["spec"]["names"]["kind"], crd["spec"]["versions"]
        expected = version["schema"]["openAPIV3Schema"]
        lacking += _lacking(kind, expected, there.get(kind, {}))
    return lacking


def _kind(schema: Schema) -> str | None:
    named = schema.get("x-kubernetes-group-version-kind") or ()
    return next((str(kind["kind"]) for kind in named if (kind["group"], kind["version"]) == (GROUP, VERSION)), None)


def _lacking(path: str, expected: Schema, there: Schema) -> Iterator[str]:
    """Yield the outermost missing fields of the schema."""
    if there.get("x-kubernetes-preserve-unknown-fields"):
        return
    fields: Schema = there.get("properties") or {}
    for name, schema in (expected.get("properties") or {}).items():
        if name in fields:
            yield from _lacking(f"{path}.{name}", schema, fields[name])
        else:
            yield f"{path}.{name}"
    for container in ("items", "additionalProperties"):
        if isinstance(expected.get(container), Mapping):
            inner: Any = there.get(container)
            yield from _lacking(f"{path}[]", expected[container], inner if isinstance(inner, Mapping) else {})

"""ServingPools and LoRAAdapters as people write them: the API's defaults hold for what they leave open."""

from typing import Any

from weft.api.servingpool import PAGE_TOKENS
from weft.domain.runner import RunnerSpec


def pool_object(namespace: str, name: str, spec: RunnerSpec, **spec_fields: Any) -> dict[str, Any]:
    """Make a pool with runners like `spec`."""
    return _object("ServingPool", namespace, name, {
        "model": {"name": "base", "uri": "file:base"},
        "lora": {"maxRank": spec.max_rank},
        "drainSeconds": 60,
        "allowedNamespaces": ["*"],
        "advanced": {
            "maxSequences": spec.max_sequences, "maxBatchTokens": 512, "maxAdapters": spec.max_adapters,
            "kvPages": max(1, spec.total_pages * spec.page_tokens // PAGE_TOKENS),
        },
        **spec_fields,
    })  # fmt: skip


def adapter_object(namespace: str, name: str, pool: str, **spec_fields: Any) -> dict[str, Any]:
    source = {"poolRef": {"namespace": namespace, "name": pool}, "source": {"uri": f"file:{name}"}, "pinned": False}
    return _object("LoRAAdapter", namespace, name, source | spec_fields)


def _object(kind: str, namespace: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }

"""The chat template in a spec: a text, or an entry of a ConfigMap, as an artifact of the depot.

It is resolved separately from the object's source, under its own uid, and published by its digest; runners do not know
it. A faulty text is published as it is, and gateways refuse chats by name. While a text cannot be read, the earlier
text stays. An object without served requests is published only once its chat template is known or refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.artifacts.depot_api import CONFIG_MAP, INLINE, BaseRef, OperationStatus, ResolveRequest
from weft.domain.routes import AdapterSpec, PoolSpec
from weft_operator.core.artifacts import Resolution, VerifiedArtifact
from weft_operator.core.resources import AdapterObject, PoolObject
from weft_operator.core.state import ClusterState

SUFFIX = "/template"
FAULT = "TemplateFault"
MAX_FAULT = 512  # characters that are published


@dataclass(frozen=True, slots=True)
class TemplateView:
    """A chat template supplied by a spec.

    `resolution`: of the present or an earlier request. `published`: the object's served state.
    """

    request: ResolveRequest | None  # None: the base is still missing
    resolution: Resolution | None
    published: PoolSpec | AdapterSpec | None
    served_before: bool  # by the stored status

    @property
    def content(self) -> VerifiedArtifact | None:
        """The content of the last successful read."""
        return self.resolution.verified if self.resolution else None

    @property
    def answer(self) -> OperationStatus:
        """The depot's answer to the request."""
        is_requested = self.resolution is not None and self.resolution.request == self.request
        return self.resolution.answer if self.resolution and is_requested else OperationStatus()

    @property
    def fault(self) -> str:
        """The reason why no chats are rendered, as clients are told; "" while they are, or it is not known."""
        if self.content or self.answer.state != "Failed":
            return ""
        return f"{self.answer.message} ({self.answer.reason})"[-MAX_FAULT:]

    @property
    def is_held(self) -> bool:
        """Whether the object waits for its chat template: it was never served, and the template is unknown."""
        is_known = self.content is not None or bool(self.fault)
        return not is_known and self.published is None and not self.served_before


def template_uid(uid: str) -> str:
    """Return the uid for resolving the chat template of an object's spec."""
    return uid + SUFFIX


def template_view(
    resource: PoolObject | AdapterObject, base: VerifiedArtifact | None, state: ClusterState
) -> TemplateView | None:
    """Gather the facts of the supplied chat template; None without a supplied template."""
    if not resource.chat_template.is_supplied:
        return None
    ref, expected = resource.meta.ref, state.expectations
    if isinstance(resource, PoolObject):
        published, digest = expected.pools.get(ref), resource.status.get("baseDigest")
    else:
        entry, digest = expected.adapters.get(ref), resource.status.get("digest")
        published = entry if entry and entry.digest else None
    request = template_request(resource, base.digest) if base else None
    resolution = state.observed.resolutions.get(template_uid(resource.meta.uid))
    return TemplateView(request, resolution, published, bool(digest))


def template_request(resource: PoolObject | AdapterObject, base_digest: str) -> ResolveRequest:
    """Make the request to the depot about the spec's chat template."""
    choice = resource.chat_template
    return ResolveRequest(
        kind="template",
        uri=f"{CONFIG_MAP}{choice.config_map_ref.name}" if choice.config_map_ref else INLINE,
        namespace=resource.meta.ref.namespace,
        base=BaseRef(base_digest),
        text=choice.inline,
    )


def template_from_status(resource: PoolObject | AdapterObject, base_digest: str, now: float) -> Resolution | None:
    """Restore the resolution implied by an object's status, for a controller at its start."""
    request, status = template_request(resource, base_digest), resource.status
    stored: Mapping[str, Any] | None = status.get("suppliedChatTemplate")
    content = VerifiedArtifact(stored["digest"], stored) if stored else None
    condition = next((c for c in status.get("conditions", ()) if c["type"] == "ChatTemplate"), None)
    if content is None:
        return None
    if (
        status.get("observedGeneration") != resource.meta.generation
        or condition is None
        or condition["status"] == "Unknown"
    ):
        return Resolution(request, verified=content)
    if condition["status"] == "False" and condition["reason"] != FAULT:
        answer = OperationStatus("Failed", reason=condition["reason"], message=condition["message"])
        return Resolution(request, answer, verified=content)
    answer = OperationStatus("Fetched", content.digest, stored, watch=content.digest)
    return Resolution(request, answer, finished_at=now, verified=content)

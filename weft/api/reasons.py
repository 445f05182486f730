"""Reasons of conditions, and what a person does about each. Reasons are API: they never change their meaning.

The reasons of an artifact that was not taken come from `weft.artifacts.errors.Reason`; those here are about objects.
"""

from enum import StrEnum

from weft.artifacts import errors


class Reason(StrEnum):
    """Why a condition has its status, beyond the depot's own reasons."""

    POOL_NOT_FOUND = "PoolNotFound"
    NOT_PERMITTED = "NotPermitted"
    NAME_CONFLICT = "NameConflict"
    NO_SLOTS = "NoSlots"
    NAMESPACE_NOT_SERVED = "NamespaceNotServed"
    BASE_NOT_READY = "BaseNotReady"
    NO_READY_RUNNER = "NoReadyRunner"
    SCALED_TO_ZERO = "ScaledToZero"
    CONVERGING = "Converging"
    CRASH_LOOP = "CrashLoop"
    UNSCHEDULABLE = "Unschedulable"
    CHILD_CONFLICT = "ChildConflict"
    CHILD_REFUSED = "ChildRefused"
    PODS_REFUSED = "PodsRefused"
    RESOLVING = "Resolving"
    RESOLVE_FAILED = "ResolveFailed"
    LOAD_FAILED = "LoadFailed"
    PUBLISHING = "Publishing"
    DELETING = "Deleting"
    ACCEPTED = "Accepted"
    VALIDATED = "Validated"
    FETCHED = "Fetched"
    PUBLISHED = "Published"
    RUNNERS_READY = "RunnersReady"


ArtifactReason = errors.Reason

ADVICE: dict[str, str] = {
    Reason.POOL_NOT_FOUND: "spec.poolRef names no ServingPool; create it or correct the name. It is tried again.",
    Reason.NOT_PERMITTED: "the pool does not accept this namespace; its owner can add it to spec.allowedNamespaces.",
    Reason.NAME_CONFLICT: "an older object serves this model name; set another spec.modelName.",
    Reason.NO_SLOTS: "the pool pins as many adapters as it can; unpin one, or raise the pool's lora.maxAdapters.",
    Reason.NAMESPACE_NOT_SERVED: "the platform serves pools of other namespaces; create the pool in one of those.",
    Reason.BASE_NOT_READY: "the pool's base model is not fetched yet; see the pool's Fetched condition.",
    Reason.NO_READY_RUNNER: "no runner of the pool is ready yet; see the pool's Available condition.",
    Reason.SCALED_TO_ZERO: "there are no requests, so no runner runs; the next request is held until one is ready.",
    Reason.CONVERGING: "runners start or leave; nothing to do.",
    Reason.CRASH_LOOP: "runners end again and again; the message has their last lines, the log has more.",
    Reason.UNSCHEDULABLE: "no node takes the runner's pod; the message names what is missing.",
    Reason.CHILD_CONFLICT: "an object that is not the pool's has the name that it needs; rename or delete that one.",
    Reason.CHILD_REFUSED: "the API server refuses an object of the pool; the message has the cause. It is tried again.",
    Reason.PODS_REFUSED: "the API server refuses the runners' pods (a quota, pod security); the message has the cause.",
    Reason.RESOLVING: "the depot is reading and checking the source; nothing to do.",
    Reason.RESOLVE_FAILED: "the depot failed on this source; its log has the cause. It is tried again.",
    Reason.LOAD_FAILED: "a runner could not load it; the message has the cause.",
    Reason.DELETING: "it is being deleted; streams that use it finish first, within the pool's drainSeconds.",
    Reason.PUBLISHING: "the scheduler has not confirmed it yet; if it stays so, see the scheduler's log.",
    Reason.ACCEPTED: "nothing forbids the object.",
    Reason.VALIDATED: "configuration, shapes and type fit the base.",
    Reason.FETCHED: "the depot has the whole content.",
    Reason.PUBLISHED: "it is in the route table: clients can call it.",
    Reason.RUNNERS_READY: "runners serve; every one that is wanted is ready.",
    ArtifactReason.SCHEME_NOT_ALLOWED: "use a URI scheme that this installation allows (file: needs a file root).",
    ArtifactReason.BAD_URI: "correct the URI; file: takes a relative path below the file root.",
    ArtifactReason.SOURCE_NOT_FOUND: "put the files at the URI, or correct it. It is tried again.",
    ArtifactReason.SOURCE_UNREACHABLE: "the source or the depot does not answer; it is tried again.",
    ArtifactReason.SOURCE_FORBIDDEN: "the source refuses these credentials, or asks for some; see the message.",
    ArtifactReason.SECRET_MISSING: "create the Secret that credentialsRef names, in the object's own namespace.",
    ArtifactReason.SECRET_FORBIDDEN: "let the depot read that one Secret; the message has the commands.",
    ArtifactReason.SECRET_INVALID: "give the Secret the keys that the message names.",
    ArtifactReason.ENDPOINT_NOT_ALLOWED: "use an endpoint that this installation allows, or have it added.",
    ArtifactReason.DEPOT_FULL: "the depot's disk is full; enlarge it. It is tried again.",
    ArtifactReason.MISSING_FILE: "add the file that the message names.",
    ArtifactReason.UNSAFE_FORMAT: "save the weights as safetensors; pickles can run code and are never opened.",
    ArtifactReason.HEADER_TOO_LARGE: "the safetensors header is too large to be real; save the file again.",
    ArtifactReason.HEADER_TRUNCATED: "the safetensors file is cut off; copy it again.",
    ArtifactReason.HEADER_INVALID: "the safetensors header is damaged; save the file again.",
    ArtifactReason.OFFSETS_INVALID: "the safetensors file is damaged or cut off; copy or save it again.",
    ArtifactReason.CONFIG_INVALID: "correct the field of the config that the message names.",
    ArtifactReason.UNSUPPORTED_ADAPTER: "train without the option that the message names.",
    ArtifactReason.RANK_TOO_LARGE: "train with a smaller rank, or raise spec.maxRank and the pool's lora.maxRank.",
    ArtifactReason.BASE_MISMATCH: "use the pool of the right base, or assert with spec.baseModel that it is the same.",
    ArtifactReason.SHAPE_MISMATCH: "the adapter does not fit the base or its own config; check what it was trained on.",
    ArtifactReason.UNKNOWN_MODULE: "the adapter changes modules this base does not have; check what it was trained on.",
    ArtifactReason.DTYPE_NOT_SUPPORTED: "save the weights as float32, float16 or bfloat16.",
    ArtifactReason.NOT_FINITE: "the weights hold NaN or infinity; take an earlier checkpoint.",
    ArtifactReason.DIGEST_MISMATCH: "the content is not what source.digest names; correct one of them.",
    ArtifactReason.TOO_LARGE: "it is larger than the depot's limit.",
    ArtifactReason.UNSUPPORTED_MODEL: "this architecture or option is not served; the message lists those that are.",
}
POOL_ADVICE: dict[str, str] = {
    Reason.NAME_CONFLICT: "an older pool serves this model name; set another spec.model.name.",
}


def advice(reason: str, kind: str) -> str | None:
    """What to do about a reason on an object of this kind; None for a reason that is not known here."""
    return (POOL_ADVICE if kind == "ServingPool" else {}).get(reason) or ADVICE.get(reason)

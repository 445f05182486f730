"""Reasons of conditions, and the remedy for each. Reasons are API: they never change their meaning.

The reasons for a refused artifact are in `weft.domain.model.errors.Reason`. The rest are about objects.
"""

from weft.domain.model.errors import Reason

ADVICE: dict[str, str] = {
    "VolumeNotAllowed": "use modelCache.emptyDir, or have the volume listed (operator.modelCache of the chart).",
    "PoolNotFound": "spec.poolRef names no ServingPool; create it or correct the name. It is tried again.",
    "NotPermitted": "the pool does not accept this namespace; its owner can add it to spec.allowedNamespaces.",
    "NameConflict": "an older object serves this model name; set a different spec.modelName.",
    "NoSlots": "the pool pins as many adapters as it can; unpin an adapter, or raise the pool's advanced.maxAdapters.",
    "NamespaceNotServed": "the platform does not serve pools of this namespace; create the pool in a served namespace.",
    "BaseNotReady": "the pool's base model is not fetched yet; see the pool's Fetched condition.",
    "NoReadyRunner": "no runner of the pool is ready yet; see the pool's Available condition.",
    "ScaledToZero": "no runner runs without requests; the next request is held until a runner is ready.",
    "Converging": "runners start or leave; nothing to do.",
    "Paused": "spec.paused is true: the pool's runners do not change until it is false.",
    "CrashLoop": "runners end again and again; the message has their last lines, the log has more.",
    "Unschedulable": "no node takes the runner's pod; the message names the missing resource.",
    "ChildConflict": "an object outside the pool has a name that the pool needs; rename or delete the object.",
    "ChildRefused": "the API server refuses an object of the pool; the message has the cause. It is tried again.",
    "PodsRefused": "the API server refuses the runners' pods (a quota, pod security); the message has the cause.",
    "Resolving": "the depot is reading and checking the source; nothing to do.",
    "ResolveFailed": "the depot failed on this source; its log has the cause. It is tried again.",
    "LoadFailed": "a runner could not load it; the message has the cause.",
    "Deleting": "it is being deleted; streams that use it finish first, within the pool's drainSeconds.",
    "Publishing": "the scheduler has not confirmed it yet; if it stays so, see the scheduler's log.",
    "InvalidSpec": "the operator cannot read the spec; apply the CustomResourceDefinitions of its version.",
    "SecretConflict": "a Secret of this name is somebody else's; set a different spec.secretName, or spec.secretRef.",
    "SecretRefused": "the API server refuses the key's Secret; the message has the cause. It is tried again.",
    "KeyTaken": "another object or `weft key create` has this key; choose a different key.",
    "KeyRevoked": "a person has revoked this key for good; delete its Secret, or choose a different key.",
    "KeyExpired": "set a later spec.expiresAt or spec.expiresAfter, or delete the Secret for a fresh key.",
    "Registering": "the supervisor has not answered yet; if it stays so, see the operator's log.",
    "Registered": "gateways take the key.",
    "Accepted": "nothing forbids the object.",
    "Validated": "configuration, shapes and type fit the base.",
    "Fetched": "the depot has the whole content.",
    "TemplateOfAdapter": "chats are rendered by the chat template among the adapter's files.",
    "TemplateOfBase": "chats are rendered by the base model's chat template.",
    "TemplateOfSpec": "chats are rendered by the chat template given by spec.chatTemplate.",
    "TemplateFault": "chats are refused, completions go on; correct the chat template as the message says.",
    "NoTemplate": "chats are refused, completions go on; add a chat_template.jinja to the files for chats.",
    "Published": "it is in the route table: clients can call it.",
    "UpdateFailed": "clients can call it with the previous content; Fetched has the fault of the new source.",
    "RunnersReady": "runners serve; every desired runner is ready.",
    Reason.SCHEME_NOT_ALLOWED: "use a URI scheme allowed by this installation (file: needs a file root).",
    Reason.BAD_URI: "correct the URI; file: takes a relative path below the file root.",
    Reason.SOURCE_NOT_FOUND: "put the files at the URI, or correct it. It is tried again.",
    Reason.SOURCE_UNREACHABLE: "the source or the depot does not answer; it is tried again.",
    Reason.SOURCE_FORBIDDEN: "the source refuses these credentials, or asks for some; see the message.",
    Reason.SECRET_MISSING: "create the Secret named by credentialsRef, in the object's namespace.",
    Reason.SECRET_FORBIDDEN: "let the depot read the Secret; the message has the commands.",
    Reason.SECRET_INVALID: "give the Secret the keys named by the message.",
    Reason.CONFIG_MAP_MISSING: "create the ConfigMap and entry named by configMapRef, in the object's namespace.",
    Reason.CONFIG_MAP_FORBIDDEN: "let the depot read the ConfigMap; the message has the commands.",
    Reason.ENDPOINT_NOT_ALLOWED: "use an endpoint allowed by this installation, or have it added.",
    Reason.DEPOT_FULL: "the depot's disk is full; enlarge it. It is tried again.",
    Reason.MISSING_FILE: "add the file named by the message.",
    Reason.UNSAFE_FORMAT: "save the weights as safetensors; pickles can run code and are never opened.",
    Reason.HEADER_TOO_LARGE: "the safetensors header is too large to be real; save the file again.",
    Reason.HEADER_TRUNCATED: "the safetensors file is cut off; copy it again.",
    Reason.HEADER_INVALID: "the safetensors header is damaged; save the file again.",
    Reason.OFFSETS_INVALID: "the safetensors file is damaged or cut off; copy or save it again.",
    Reason.CONFIG_INVALID: "correct the config's field named by the message.",
    Reason.UNSUPPORTED_ADAPTER: "the message names the unsupported part, and the remedy.",
    Reason.RANK_TOO_LARGE: "train with a smaller rank, or raise spec.maxRank and the pool's lora.maxRank.",
    Reason.BASE_MISMATCH: "use the pool of the right base, or assert with spec.baseModel that it is the same.",
    Reason.SHAPE_MISMATCH: "the adapter does not fit the base or its config; check the base model of its training.",
    Reason.UNKNOWN_MODULE: "the adapter changes modules this base does not have; check the base model of its training.",
    Reason.DTYPE_NOT_SUPPORTED: "save the weights as float32, float16 or bfloat16.",
    Reason.NOT_FINITE: "the weights hold NaN or infinity; take an earlier checkpoint.",
    Reason.DIGEST_MISMATCH: "the content does not match source.digest; correct the content or the digest.",
    Reason.TOO_LARGE: "it is larger than the depot's limit.",
    Reason.UNSUPPORTED_MODEL: "this architecture or option is not served; the message lists the supported ones.",
}
POOL_ADVICE: dict[str, str] = {"NameConflict": "an older pool serves this model name; set a different spec.model.name."}

KEY_ADVICE: dict[str, str] = {
    "NamespaceNotServed": "the platform does not serve APIKeys of this namespace; have it added to apiKeys.namespaces.",
    Reason.SECRET_MISSING: "create the Secret named by spec.secretRef.",
    Reason.SECRET_FORBIDDEN: "let the operator read and make Secrets there: add the namespace to apiKeys.namespaces.",
    Reason.SECRET_INVALID: "put a key of 32 to 512 printable characters into the entry named by spec.secretRef.",
}


def advice(reason: str, kind: str) -> str | None:
    """Return the remedy for a reason on an object of this kind, or None for an unknown reason."""
    advice_of_kind = {"ServingPool": POOL_ADVICE, "APIKey": KEY_ADVICE}.get(kind, {})
    return advice_of_kind.get(reason) or ADVICE.get(reason)

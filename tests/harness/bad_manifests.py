"""Manifests that have to be refused: by the API server through the CRDs, and by the local API, for the same reason.

Rows say where (`field`) and what (`says`), and both judges are held to both. Plain violations of a schema are told by
the API server in words of its own that no CRD can change; those rows name a wording, and `WORDINGS` has both texts.
"""

from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]

# What a plain schema violation is called here, and what the API server calls it.
WORDINGS: dict[str, tuple[str, str]] = {
    "missing": ("Field required", "Required value"),
    "too small": ("greater than or equal to", "greater than or equal to"),
    "too large": ("less than or equal to", "less than or equal to"),
    "one of": ("Input should be", "Unsupported value"),
    "no integer": ("valid integer", "must be of type integer"),
    "no boolean": ("valid boolean", "must be of type boolean"),
    "no string": ("valid string", "must be of type string"),
    "no object": ("valid dictionary", "must be of type object"),
    "too long": ("String should have at most", "Too long"),
    "too short": ("String should have at least", "should be at least"),
    "too many": ("at most", "must have at most"),
    "too few": ("at least", "should have at least"),
    "pattern": ("should match", "should match"),
    "no quantity": ("no quantity", "should match"),
    "no amount": ("no quantity", "must be of type"),
    "negative": ("no quantity", "greater than or equal to 0"),
    "twice": ("two entries have the same name", "Duplicate value"),
    "unknown field": ("unknown field", "unknown field"),
    # The API server checks metadata.name itself before any rule of the CRD.
    "name": ("RFC 1123 label", "RFC 1123"),
}


OFFLOAD: Manifest = {"deviceBytes": "4Gi", "diskPath": "/mnt/weft"}


@dataclass(frozen=True)
class Bad:
    """One refusal. With `before`, `wish` is an update of it."""

    name: str
    field: str
    says: str
    wish: Manifest
    before: Manifest | None = None

    @property
    def here(self) -> str:
        """What the local API's message contains."""
        return WORDINGS.get(self.says, (self.says, self.says))[0]

    @property
    def there(self) -> str:
        """What the API server's message contains."""
        return WORDINGS.get(self.says, (self.says, self.says))[1]


def manifest(kind: str, name: str, spec: Manifest, namespace: str = "default") -> Manifest:
    """A whole object."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def pool(name: str = "tiny", namespace: str = "default", **spec: Any) -> Manifest:
    """A ServingPool that is in order but for `spec`."""
    return manifest("ServingPool", name, {"model": {"uri": "file:models/tiny"}} | spec, namespace)


def adapter(name: str = "upper", namespace: str = "default", **spec: Any) -> Manifest:
    """A LoRAAdapter that is in order but for `spec`."""
    whole = {"poolRef": {"name": "tiny"}, "source": {"uri": "file:adapters/upper"}} | spec
    return manifest("LoRAAdapter", name, whole, namespace)


def source(**fields: Any) -> Manifest:
    return adapter(source=fields)


def scaled(**fields: Any) -> Manifest:
    return pool(autoscaling={"maxReplicas": 4} | fields)


def grouped(*groups: Manifest, **spec: Any) -> Manifest:
    return pool(runnerGroups=list(groups), **spec)


def offloaded(**fields: Any) -> Manifest:
    """None: without that field."""
    return pool(memory={"offload": {name: value for name, value in (OFFLOAD | fields).items() if value is not None}})


def templated(**fields: Any) -> Manifest:
    return pool(template=fields)


def of_pool(name: str, path: str, says: str, **spec: Any) -> Bad:
    """A pool with these fields, refused at a path of its spec."""
    return Bad(name, f"spec.{path}", says, pool(**spec))


def of_adapter(name: str, path: str, says: str, **spec: Any) -> Bad:
    """An adapter with these fields, refused at a path of its spec."""
    return Bad(name, f"spec.{path}", says, adapter(**spec))


def in_pool(name: str, path: str, says: str, value: Any, **beside: Any) -> Bad:
    """A pool with this value at a path of its spec, beside these fields."""
    return of_pool(name, path, says, **_put(pool(**beside)["spec"], path, value))


def in_adapter(name: str, path: str, says: str, value: Any, **beside: Any) -> Bad:
    """An adapter with this value at a path of its spec, beside these fields."""
    return of_adapter(name, path, says, **_put(adapter(**beside)["spec"], path, value))


def _put(into: Manifest, path: str, value: Any) -> Manifest:
    """`into` with the value at `a.b[0].c`; what is on the way and not there is made."""
    step, _, below = path.partition(".")
    field, is_list = step.removesuffix("[0]"), step.endswith("[0]")
    inner = _put({} if is_list else into.get(field, {}), below, value) if below else value
    return into | {field: [inner] if is_list else inner}


_DIGEST = "sha256:" + "0" * 64
_URI = "write file:PATH, pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, "
_URI += "oci://HOST/REPOSITORY:TAG, https://HOST/FOLDER or depot:sha256:..."
_ENDPOINT = "write http://HOST[:PORT] or https://HOST[:PORT], without a path"
_NAMESPACE = "write the name of a namespace, or '*' for all of them"
_LABEL = "only lower-case letters, digits and '-' inside are allowed"
_MODEL_NAME = "only letters, digits and . _ : / - inside are allowed"


_INLINE, _CONFIG_MAP = "inline is given with from: Inline, and only then", "configMapRef is given with from: ConfigMap"
_RESERVED = "are the operator's own"
_EXCLUSIVE = "replicas and autoscaling exclude each other"
_ABOVE = "above the template's limit"
_FOR_HF = "revision is for hf: sources"
_S3, _KEY = "s3://bucket/adapters/upper", {"name": "key"}
_CREDENTIALS = "credentialsRef is for hf:, s3: and oci: sources"
_PODS, _GRID = "parallelism.podsPerRunner", {"tensor": 2, "pipeline": 2}
_RANKS = "a runner has tensor times pipeline processes: at most 64"
_COST = "controller.kubernetes.io/pod-deletion-cost"
_CLAIM = "modelCache.persistentVolumeClaim.claimName"

BAD: tuple[Bad, ...] = (
    # ---------------------------------------------------------------------------------------- LoRAAdapter
    Bad("no pool", "spec.poolRef", "missing", manifest("LoRAAdapter", "upper", {"source": {"uri": "file:a"}})),
    of_adapter("a pool without a name", "poolRef.name", "missing", poolRef={}),
    in_adapter("a pool's name in capitals", "poolRef.name", _LABEL, "Tiny"),
    in_adapter("a pool's namespace in capitals", "poolRef.namespace", _LABEL, "B", poolRef={"name": "a"}),
    Bad("no source", "spec.source", "missing", manifest("LoRAAdapter", "upper", {"poolRef": {"name": "tiny"}})),
    Bad("no URI", "spec.source.uri", "missing", source(digest=_DIGEST)),
    in_adapter("a path instead of a URI", "source.uri", _URI, "adapters/upper"),
    in_adapter("a scheme that is not served", "source.uri", _URI, "ftp://host/upper"),
    Bad("https without digest", "spec.source.digest", "an https: source needs a digest", source(uri="https://host/a")),
    Bad("https with a query", "spec.source.uri", _URI, source(uri="https://host/upper?x=1", digest=_DIGEST)),
    Bad("oci without a repository", "spec.source.uri", _URI, source(uri="oci://ghcr.io", digest=_DIGEST)),
    in_adapter("hf without an organisation", "source.uri", _URI, "hf:upper"),
    in_adapter("hf with its revision inside", "source.uri", _URI, "hf:acme/upper@main"),
    in_adapter("s3 without slashes", "source.uri", _URI, "s3:bucket/upper"),
    in_adapter("pvc without a claim", "source.uri", _URI, "pvc:/upper"),
    in_adapter("file without a path", "source.uri", _URI, "file:"),
    in_adapter("a line break in a URI", "source.uri", _URI, "file:a\nb"),
    Bad("a URI beyond its length", "spec.source.uri", "too long", source(uri="file:" + "a" * 2048)),
    in_adapter("a short digest", "source.digest", "no digest", "sha256:12", source={"uri": "file:a"}),
    in_adapter("a revision of a folder", "source.revision", _FOR_HF, "main", source={"uri": "file:a"}),
    in_adapter("an empty revision", "source.revision", "too short", "", source={"uri": "hf:acme/upper"}),
    Bad(
        "a file's endpoint",
        "spec.source.endpoint",
        "endpoint is for s3: sources",
        source(uri="file:a", endpoint="http://h"),
    ),
    in_adapter("an endpoint that is a host", "source.endpoint", _ENDPOINT, "minio:9000", source={"uri": _S3}),
    in_adapter("an endpoint with a path", "source.endpoint", _ENDPOINT, "http://minio:9000/x", source={"uri": _S3}),
    in_adapter("a password's endpoint", "source.endpoint", _ENDPOINT, "http://me:secret@minio", source={"uri": _S3}),
    in_adapter("credentials for a folder", "source.credentialsRef", _CREDENTIALS, _KEY, source={"uri": "file:a"}),
    in_adapter("a capital Secret", "source.credentialsRef.name", "(RFC 1123 subdomain)", "Key", source={"uri": _S3}),
    Bad("credentials without a name", "spec.source.credentialsRef.name", "missing", source(uri=_S3, credentialsRef={})),
    in_adapter(
        "another namespace's Secret",
        "source.credentialsRef.namespace",
        "unknown field",
        "b",
        source={"uri": _S3, "credentialsRef": _KEY},
    ),
    of_adapter("a text of none", "chatTemplate.inline", _INLINE, chatTemplate={"from": "Inline"}),
    in_adapter("an empty text", "chatTemplate.inline", "too short", "", chatTemplate={"from": "Inline"}),
    in_adapter("a text without end", "chatTemplate.inline", "too long", "a" * 262145, chatTemplate={"from": "Inline"}),
    of_adapter("an entry of nothing", "chatTemplate.configMapRef", _CONFIG_MAP, chatTemplate={"from": "ConfigMap"}),
    in_adapter("a ConfigMap that is not chosen", "chatTemplate.configMapRef", _CONFIG_MAP, {"name": "chat"}),
    in_adapter(
        "another namespace's ConfigMap",
        "chatTemplate.configMapRef.namespace",
        "unknown field",
        "b",
        chatTemplate={"from": "ConfigMap", "configMapRef": _KEY},
    ),
    in_adapter("rank zero", "maxRank", "too small", 0),
    in_adapter("a rank beyond every kernel", "maxRank", "too large", 257),
    in_adapter("a rank in words", "maxRank", "no integer", "eight"),
    in_adapter("pinned in words", "pinned", "no boolean", "yes"),
    in_adapter("a tier that is a device", "tier", "one of", "Device"),
    in_adapter("a space in a model name", "modelName", _MODEL_NAME, "a b"),
    of_adapter("a model name beyond its length", "modelName", "too long", modelName="a" * 254),
    in_adapter("a number as model name", "modelName", "no string", 5),
    in_adapter("a misspelt field", "sourc", "unknown field", {"uri": "file:a"}),
    Bad("a name in capitals", "metadata.name", "name", adapter("Upper")),
    Bad("a name with a dot", "metadata", _LABEL, adapter("a.b")),
    Bad("a name of 64 letters", "metadata", "at most 63 characters", adapter("a" * 64)),
    # ---------------------------------------------------------------------------------------- ServingPool
    Bad("no model", "spec.model", "missing", manifest("ServingPool", "tiny", {})),
    of_pool("a model without a URI", "model.uri", "missing", model={"name": "tiny"}),
    in_pool("a model by its path", "model.uri", _URI, "/models/tiny"),
    in_pool("a model's name with a space", "model.name", _MODEL_NAME, "a b", model={"uri": "file:a"}),
    in_pool("a revision of a claim", "model.revision", _FOR_HF, "1", model={"uri": "pvc:a/b"}),
    Bad("a model that changes", "spec.model.uri", "cannot change", pool(model={"uri": "file:other"}), pool()),
    in_pool("replicas below zero", "replicas", "too small", -1),
    in_pool("replicas beyond the limit", "replicas", "too large", 1025),
    in_pool("replicas in words", "replicas", "no integer", "two"),
    of_pool("replicas and autoscaling", "autoscaling", _EXCLUSIVE, replicas=2, autoscaling={"maxReplicas": 4}),
    Bad(
        "autoscaling of a fixed pool",
        "spec.autoscaling",
        _EXCLUSIVE,
        pool(replicas=2, autoscaling={"maxReplicas": 4}),
        pool(replicas=2),
    ),
    of_pool("autoscaling without a bound", "autoscaling.maxReplicas", "missing", autoscaling={}),
    in_pool("a bound of nothing", "autoscaling.maxReplicas", "too small", 0, autoscaling={"minReplicas": 0}),
    Bad(
        "the least above the most",
        "spec.autoscaling.maxReplicas",
        "maxReplicas must be at least minReplicas",
        scaled(minReplicas=5),
    ),
    Bad("idle for no time", "spec.autoscaling.idleSeconds", "too small", scaled(idleSeconds=0)),
    in_pool("no slot", "advanced.maxAdapters", "too small", 0),
    in_pool("slots beyond the limit", "advanced.maxAdapters", "too large", 4097),
    of_pool("a cache nowhere", "modelCache.emptyDir", "exactly one of", modelCache={}),
    of_pool("caches", "modelCache.emptyDir", "exactly one of", modelCache={"emptyDir": {}, "hostPath": {"path": "/a"}}),
    in_pool("a cache below a folder that is named by dots", "modelCache.hostPath.path", "pattern", "/srv/../etc"),
    of_pool("a cache of no claim", _CLAIM, "missing", modelCache={"persistentVolumeClaim": {}}),
    in_pool("a rollout that replaces nobody", "rollout.maxUnavailable", "both 0", "0%", rollout={"maxSurge": 0}),
    of_pool(
        "a surge of runners of several pods",
        "rollout.maxUnavailable",
        "replaced in place",
        rollout={"maxUnavailable": 0, "maxSurge": 1},
        parallelism={"pipeline": 2, "podsPerRunner": 2},
    ),
    in_pool("no share of memory", "memory.fraction", "at least 0.01", 0),
    in_pool("more than all memory", "memory.fraction", "too large", 1.5),
    in_pool("share and budget", "memory.fraction", "for pools that do not offload", 0.5, memory={"offload": OFFLOAD}),
    in_pool("no page at all", "advanced.kvPages", "too small", 0),
    in_pool("an unknown order", "advanced.queue", "one of", "lifo"),
    in_pool(
        "more sequences than tokens",
        "advanced.maxBatchTokens",
        "must be at least maxSequences",
        599,
        advanced={"maxSequences": 600},
    ),
    in_pool("a model in no part", "parallelism.tensor", "too small", 0),
    in_pool("a stage for each token", "parallelism.pipeline", "too large", 65),
    *(
        of_pool(
            f"{n} pods", _PODS, "every pod of a runner has as many processes", parallelism=_GRID | {"podsPerRunner": n}
        )
        for n in (3, 8)
    ),
    in_pool("more than 64 ranks", "parallelism.pipeline", _RANKS, 9, parallelism={"tensor": 8}),
    Bad("an offload pool without budgets", "spec.memory.offload.diskPath", "missing", offloaded(diskPath=None)),
    Bad("bytes in words", "spec.memory.offload.deviceBytes", "no quantity", offloaded(deviceBytes="four")),
    Bad("a disk path that climbs", "spec.memory.offload.diskPath", "pattern", offloaded(diskPath="/a/../b")),
    Bad("a host tier in words", "spec.memory.offload.hostBytes", "no quantity", offloaded(hostBytes="one")),
    Bad("KV in int8", "spec.memory.offload.kv", "one of", offloaded(kv="int8")),
    Bad("attention on the host", "spec.memory.offload.cpuAttention", "unknown field", offloaded(cpuAttention="Auto")),
    Bad("weights of two bits", "spec.memory.offload.weights", "one of", offloaded(weights="int2")),
    in_pool("speculation", "advanced.speculation", "one of", "Ngram"),
    in_pool("sparse attention", "advanced.sparseAttention", "one of", "TopP", memory={"offload": OFFLOAD}),
    in_pool("sparse attention in memory", "advanced.sparseAttention", "for pools that offload", "TopK"),
    in_pool("tensor ranks that offload", "memory.offload", "do not offload", OFFLOAD, parallelism={"tensor": 2}),
    in_pool(
        "a device above the pod",
        "memory.offload",
        _ABOVE,
        OFFLOAD,
        template={"resources": {"limits": {"memory": "3Gi"}}},
    ),
    in_pool(
        "device and host above the pod",
        "memory.offload",
        _ABOVE,
        OFFLOAD | {"hostBytes": "4Gi"},
        template={"resources": {"limits": {"memory": "7Gi"}}},
    ),
    in_pool("an unknown phase", "phases.mode", "one of", "Disaggregated"),
    of_pool(
        "one runner, two phases",
        "phases",
        "has to be at least 2",
        phases={"mode": "Split"},
        autoscaling={"maxReplicas": 1},
    ),
    Bad("a group of no phase", "spec.runnerGroups[0].phase", "one of", grouped({"name": "a", "phase": "Mixed"})),
    Bad(
        "groups for prompts alone",
        "spec.runnerGroups",
        "nobody is left for the other one",
        grouped({"name": "a", "phase": "Prompt"}, {"name": "b", "phase": "Prompt"}, phases={"mode": "Split"}),
    ),
    in_pool("a token in no time", "slo.tokenTimeMs", "too small", 0),
    in_pool("too late without a time", "slo.admission", "needs ttftMs", "Reject"),
    in_pool("a tenant without a share", "fairness.weights.a", "too small", 0),
    in_pool("a weight of no namespace", "fairness.weights", "no namespace", {"A_b": 1}),
    in_pool("a block of an earlier form", "scheduler", "unknown field", {"queue": "fcfs"}),
    in_pool("an unknown parser", "model.toolCallParser", "one of", "own", model={"uri": "file:base"}),
    in_pool("drained at once", "drainSeconds", "too small", 0),
    in_pool("answers of no token", "model.maxOutputTokens", "too small", 0, model={"uri": "file:base"}),
    in_pool("an adapter's chat template", "model.chatTemplate.from", "one of", "Adapter", model={"uri": "file:base"}),
    in_pool("a template beside it", "model.chatTemplate.inline", _INLINE, "{{ a }}", model={"uri": "file:base"}),
    of_pool("a namespace in capitals", "allowedNamespaces[1]", _NAMESPACE, allowedNamespaces=["a", "B"]),
    of_pool("a pattern of namespaces", "allowedNamespaces[0]", _NAMESPACE, allowedNamespaces=["team-*"]),
    in_pool("too many namespaces", "allowedNamespaces", "too many", [f"n{i}" for i in range(257)]),
    Bad("a group without a name", "spec.runnerGroups[0].name", "missing", grouped({"minRunners": 1})),
    in_pool("a group's name in capitals", "runnerGroups[0].name", _LABEL, "A100"),
    in_pool("two groups of one name", "runnerGroups", "twice", [{"name": "a"}, {"name": "a"}]),
    Bad("nine groups", "spec.runnerGroups", "too many", grouped(*({"name": f"g{i}"} for i in range(9)))),
    Bad(
        "a least above its most",
        "spec.runnerGroups[0].maxRunners",
        "maxRunners must be at least minRunners",
        grouped({"name": "a", "minRunners": 3, "maxRunners": 2}),
    ),
    Bad(
        "groups that need more than the bound",
        "spec.runnerGroups",
        "add up to more than autoscaling.maxReplicas",
        grouped({"name": "a", "minRunners": 3}, {"name": "b", "minRunners": 2}, autoscaling={"maxReplicas": 4}),
    ),
    Bad(
        "groups without room for the bound",
        "spec.runnerGroups",
        "add up to less than autoscaling.maxReplicas",
        grouped({"name": "a", "maxRunners": 1}, {"name": "b", "maxRunners": 2}, autoscaling={"maxReplicas": 4}),
    ),
    in_pool("a volume", "template.volumes", "unknown field", [{"name": "etc", "hostPath": {"path": "/etc"}}]),
    in_pool("a security context", "template.securityContext", "unknown field", {"runAsUser": 0}),
    in_pool("a service account", "template.serviceAccountName", "unknown field", "admin"),
    in_pool("a command", "template.command", "unknown field", ["sh"]),
    in_pool("an image with a space", "template.image", "pattern", "weft runner"),
    in_pool("an amount in words", "template.resources.limits.cpu", "no quantity", "two"),
    in_pool("a truth as an amount", "template.resources.limits.cpu", "no amount", True),
    in_pool("an amount below zero", "template.resources.limits.cpu", "negative", -1),
    Bad(
        "more asked for than allowed",
        "spec.template.resources.requests",
        "requests may not be above limits",
        templated(resources={"limits": {"memory": "1Gi"}, "requests": {"memory": "1025Mi"}}),
    ),
    in_pool("a variable twice", "template.env", "twice", [{"name": "A"}, {"name": "A", "value": "b"}]),
    Bad(
        "a Secret's variable",
        "spec.template.env[0].valueFrom",
        "unknown field",
        templated(env=[{"name": "A", "valueFrom": {}}]),
    ),
    in_pool("a variable's name with '='", "template.env[0].name", "pattern", "A=B"),
    in_pool("a label of the operator", "template.labels", _RESERVED, {"serving.weft.dev/pool": "other"}),
    in_pool("an annotation of the operator", "template.annotations", _RESERVED, {_COST: "1"}),
    in_pool("a label's value with a space", "template.labels.a", "pattern", "b c"),
    in_pool("a cluster's priority", "template.priorityClassName", "are the cluster's own", "system-node-critical"),
    in_pool("a label's key with a space", "template.labels", "no label key", {"a b": "c"}),
    in_pool("an unknown effect", "template.tolerations[0].effect", "one of", "Never"),
)

# On the right side of each bound: both judges take them.
GOOD: dict[str, Manifest] = {
    "autoscaling between equal bounds": scaled(minReplicas=4),
    "to zero": scaled(minReplicas=0, idleSeconds=1),
    "as many phases as runners": pool(phases={"mode": "Split"}, autoscaling={"maxReplicas": 2}),
    "a group for each phase": grouped(
        {"name": "a", "phase": "Prompt"}, {"name": "b", "phase": "Token"}, phases={"mode": "Split"}
    ),
    "a group between equal bounds": grouped({"name": "a", "minRunners": 2, "maxRunners": 2}),
    "groups that need exactly the bound": grouped(
        {"name": "a", "minRunners": 3}, {"name": "b", "minRunners": 1}, autoscaling={"maxReplicas": 4}
    ),
    "groups with exactly the room": grouped(
        {"name": "a", "maxRunners": 1}, {"name": "b", "maxRunners": 3}, autoscaling={"maxReplicas": 4}
    ),
    "64 ranks": pool(parallelism={"tensor": 8, "pipeline": 8}),
    "a pod for two ranks": pool(parallelism={"tensor": 2, "pipeline": 2, "podsPerRunner": 2}),
    "a pod for each rank": pool(parallelism={"tensor": 2, "pipeline": 2, "podsPerRunner": 4}),
    "no groups": grouped(autoscaling={"maxReplicas": 4}),
    "as many sequences as tokens": pool(advanced={"maxSequences": 512, "maxBatchTokens": 512}),
    "more sequences than a CPU has tokens by default": pool(advanced={"maxSequences": 600}),
    "requests at the limits": templated(resources={"limits": {"cpu": "1500m"}, "requests": {"cpu": "1.5"}}),
    "requests just below the limits": templated(resources={"limits": {"cpu": 1}, "requests": {"cpu": "999m"}}),
    "a binary gigabyte above a decimal one": templated(resources={"limits": {"a": "1Gi"}, "requests": {"a": "1G"}}),
    "requests of what has no limit": templated(resources={"limits": {"memory": "1Gi"}, "requests": {"cpu": 8}}),
    "a private repository": source(uri="hf:acme/upper/sub", revision="v1.0", credentialsRef={"name": "hub.token"}),
    "a bucket elsewhere": source(uri="s3://bucket", endpoint="http://[::1]:9000", credentialsRef={"name": "key"}),
    "a claim's root": source(uri="pvc:claim"),
    "63 letters": adapter("a" * 63),
    "a label's key of 317 letters": pool(template={"labels": {"a" * 253 + "/" + "b" * 63: "c"}}),
    "scheduling that is the API server's to judge": templated(
        affinity={"nodeAffinity": {"unknown": 1}}, topologySpreadConstraints=[{"topologyKey": "zone"}]
    ),
    "a weight of 63 letters": pool(fairness={"weights": {"a" * 63: 1}}),
}

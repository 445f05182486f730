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


OFFLOAD: Manifest = {"mode": "Auto", "deviceBytes": "4Gi", "diskPath": "/mnt/weft"}


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


def templated(**fields: Any) -> Manifest:
    return pool(template=fields)


_DIGEST = "sha256:" + "0" * 64
_POLL = "pollInterval is for hf:, s3: and oci: sources that can change"
_URI = "write file:PATH, pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, "
_URI += "oci://HOST/REPOSITORY:TAG, https://HOST/FOLDER or depot:sha256:..."
_ENDPOINT = "write http://HOST[:PORT] or https://HOST[:PORT], without a path"
_LABEL = "only lower-case letters, digits and '-' inside are allowed"
_MODEL_NAME = "only letters, digits and . _ : / - inside are allowed"


def _weights(**weights: int) -> Manifest:
    return pool(scheduler={"fairness": {"weights": weights}})


_NAMES = "names is given with from: List, and only then"
_RESERVED = "are the operator's own"
_S3 = "s3://bucket/adapters/upper"

BAD: tuple[Bad, ...] = (
    # ---------------------------------------------------------------------------------------- LoRAAdapter
    Bad("no pool", "spec.poolRef", "missing", manifest("LoRAAdapter", "upper", {"source": {"uri": "file:a"}})),
    Bad("a pool without a name", "spec.poolRef.name", "missing", adapter(poolRef={})),
    Bad("a pool's name in capitals", "spec.poolRef.name", _LABEL, adapter(poolRef={"name": "Tiny"})),
    Bad(
        "a pool's namespace in capitals",
        "spec.poolRef.namespace",
        _LABEL,
        adapter(poolRef={"name": "a", "namespace": "B"}),
    ),
    Bad("no source", "spec.source", "missing", manifest("LoRAAdapter", "upper", {"poolRef": {"name": "tiny"}})),
    Bad("no URI", "spec.source.uri", "missing", source(digest=_DIGEST)),
    Bad("a path instead of a URI", "spec.source.uri", _URI, source(uri="adapters/upper")),
    Bad("a scheme that is not served", "spec.source.uri", _URI, source(uri="ftp://host/upper")),
    Bad(
        "https without a digest",
        "spec.source.digest",
        "an https: source needs a digest",
        source(uri="https://host/upper"),
    ),
    Bad(
        "a poll interval without a unit",
        "spec.source.pollInterval",
        "write hours, minutes and seconds",
        source(uri="hf:acme/upper", pollInterval="60"),
    ),
    Bad(
        "a poll interval that is too short",
        "spec.source.pollInterval",
        "pollInterval has to be at least 10s",
        source(uri="hf:acme/upper", pollInterval="9s"),
    ),
    Bad("a poll interval of a file", "spec.source.pollInterval", _POLL, source(uri="file:upper", pollInterval="1m")),
    Bad(
        "a poll interval of a digest",
        "spec.source.pollInterval",
        _POLL,
        source(uri="s3://bucket/upper", digest=_DIGEST, pollInterval="1m"),
    ),
    Bad(
        "a poll interval of a commit",
        "spec.source.pollInterval",
        _POLL,
        source(uri="hf:acme/upper", revision="a" * 40, pollInterval="1m"),
    ),
    Bad("https with a query", "spec.source.uri", _URI, source(uri="https://host/upper?x=1", digest=_DIGEST)),
    Bad("oci without a repository", "spec.source.uri", _URI, source(uri="oci://ghcr.io", digest=_DIGEST)),
    Bad("hf without an organisation", "spec.source.uri", _URI, source(uri="hf:upper")),
    Bad("hf with its revision inside", "spec.source.uri", _URI, source(uri="hf:acme/upper@main")),
    Bad("s3 without slashes", "spec.source.uri", _URI, source(uri="s3:bucket/upper")),
    Bad("pvc without a claim", "spec.source.uri", _URI, source(uri="pvc:/upper")),
    Bad("file without a path", "spec.source.uri", _URI, source(uri="file:")),
    Bad("a line break in a URI", "spec.source.uri", _URI, source(uri="file:a\nb")),
    Bad("a URI beyond its length", "spec.source.uri", "too long", source(uri="file:" + "a" * 2048)),
    Bad("a short digest", "spec.source.digest", "no digest", source(uri="file:a", digest="sha256:12")),
    Bad(
        "a revision of a folder",
        "spec.source.revision",
        "revision is for hf: sources",
        source(uri="file:a", revision="main"),
    ),
    Bad("an empty revision", "spec.source.revision", "too short", source(uri="hf:acme/upper", revision="")),
    Bad(
        "an endpoint of a folder",
        "spec.source.endpoint",
        "endpoint is for s3: sources",
        source(uri="file:a", endpoint="http://h"),
    ),
    Bad("an endpoint that is a host", "spec.source.endpoint", _ENDPOINT, source(uri=_S3, endpoint="minio:9000")),
    Bad("an endpoint with a path", "spec.source.endpoint", _ENDPOINT, source(uri=_S3, endpoint="http://minio:9000/x")),
    Bad(
        "an endpoint with a password",
        "spec.source.endpoint",
        _ENDPOINT,
        source(uri=_S3, endpoint="http://me:secret@minio:9000"),
    ),
    Bad(
        "credentials for a folder",
        "spec.source.credentialsRef",
        "credentialsRef is for hf:, s3: and oci: sources",
        source(uri="file:a", credentialsRef={"name": "key"}),
    ),
    Bad(
        "a Secret's name in capitals",
        "spec.source.credentialsRef.name",
        "(RFC 1123 subdomain)",
        source(uri=_S3, credentialsRef={"name": "Key"}),
    ),
    Bad("credentials without a name", "spec.source.credentialsRef.name", "missing", source(uri=_S3, credentialsRef={})),
    Bad(
        "a Secret of another namespace",
        "spec.source.credentialsRef.namespace",
        "unknown field",
        source(uri=_S3, credentialsRef={"name": "key", "namespace": "other"}),
    ),
    Bad("rank zero", "spec.maxRank", "too small", adapter(maxRank=0)),
    Bad("a rank beyond every kernel", "spec.maxRank", "too large", adapter(maxRank=257)),
    Bad("a rank in words", "spec.maxRank", "no integer", adapter(maxRank="eight")),
    Bad("pinned in words", "spec.pinned", "no boolean", adapter(pinned="yes")),
    Bad("a tier that is a device", "spec.tier", "one of", adapter(tier="Device")),
    Bad("a space in a model name", "spec.modelName", _MODEL_NAME, adapter(modelName="a b")),
    Bad("a model name beyond its length", "spec.modelName", "too long", adapter(modelName="a" * 254)),
    Bad("a number as model name", "spec.modelName", "no string", adapter(modelName=5)),
    Bad("a misspelt field", "spec.sourc", "unknown field", adapter(sourc={"uri": "file:a"})),
    Bad("a name in capitals", "metadata.name", "name", adapter("Upper")),
    Bad("a name with a dot", "metadata", _LABEL, adapter("a.b")),
    Bad("a name of 64 letters", "metadata", "at most 63 characters", adapter("a" * 64)),
    # ---------------------------------------------------------------------------------------- ServingPool
    Bad("no model", "spec.model", "missing", manifest("ServingPool", "tiny", {})),
    Bad("a model without a URI", "spec.model.uri", "missing", pool(model={"name": "tiny"})),
    Bad("a model by its path", "spec.model.uri", _URI, pool(model={"uri": "/models/tiny"})),
    Bad("a model's name with a space", "spec.model.name", _MODEL_NAME, pool(model={"uri": "file:a", "name": "a b"})),
    Bad(
        "a model's revision of a claim",
        "spec.model.revision",
        "revision is for hf: sources",
        pool(model={"uri": "pvc:a/b", "revision": "1"}),
    ),
    Bad("a model that changes", "spec.model.uri", "cannot change", pool(model={"uri": "file:other"}), pool()),
    Bad("replicas below zero", "spec.replicas", "too small", pool(replicas=-1)),
    Bad("replicas beyond the limit", "spec.replicas", "too large", pool(replicas=1025)),
    Bad("replicas in words", "spec.replicas", "no integer", pool(replicas="two")),
    Bad(
        "replicas and autoscaling",
        "spec.autoscaling",
        "replicas and autoscaling exclude each other",
        pool(replicas=2, autoscaling={"maxReplicas": 4}),
    ),
    Bad(
        "autoscaling of a fixed pool",
        "spec.autoscaling",
        "replicas and autoscaling exclude each other",
        pool(replicas=2, autoscaling={"maxReplicas": 4}),
        pool(replicas=2),
    ),
    Bad("autoscaling without a bound", "spec.autoscaling.maxReplicas", "missing", pool(autoscaling={})),
    Bad("a bound of nothing", "spec.autoscaling.maxReplicas", "too small", scaled(minReplicas=0, maxReplicas=0)),
    Bad(
        "the least above the most",
        "spec.autoscaling.maxReplicas",
        "maxReplicas must be at least minReplicas",
        scaled(minReplicas=5),
    ),
    Bad("idle for no time", "spec.autoscaling.idleSeconds", "too small", scaled(idleSeconds=0)),
    Bad("held for a day", "spec.autoscaling.wakeSeconds", "too large", scaled(wakeSeconds=86_400)),
    Bad("no slot", "spec.lora.maxAdapters", "too small", pool(lora={"maxAdapters": 0})),
    Bad("slots beyond the limit", "spec.lora.maxAdapters", "too large", pool(lora={"maxAdapters": 4097})),
    Bad("a cache nowhere", "spec.modelCache.emptyDir", "exactly one of", pool(modelCache={})),
    Bad(
        "a cache in two places",
        "spec.modelCache.emptyDir",
        "exactly one of",
        pool(modelCache={"emptyDir": {}, "hostPath": {"path": "/srv/weft"}}),
    ),
    Bad(
        "a cache below a folder that is named by dots",
        "spec.modelCache.hostPath.path",
        "pattern",
        pool(modelCache={"hostPath": {"path": "/srv/../etc"}}),
    ),
    Bad(
        "a cache of a claim without a name",
        "spec.modelCache.persistentVolumeClaim.claimName",
        "missing",
        pool(modelCache={"persistentVolumeClaim": {}}),
    ),
    Bad(
        "a rollout that replaces nobody",
        "spec.rollout.maxUnavailable",
        "both 0",
        pool(rollout={"maxUnavailable": "0%", "maxSurge": 0}),
    ),
    Bad(
        "a surge of runners of several pods",
        "spec.rollout.maxUnavailable",
        "replaced in place",
        pool(rollout={"maxUnavailable": 0, "maxSurge": 1}, parallelism={"pipeline": 2, "podsPerRunner": 2}),
    ),
    Bad("no share of memory", "spec.kvCache.memoryFraction", "at least 0.01", pool(kvCache={"memoryFraction": 0})),
    Bad("more than all memory", "spec.kvCache.memoryFraction", "too large", pool(kvCache={"memoryFraction": 1.5})),
    Bad(
        "a share of memory beside a budget",
        "spec.kvCache.memoryFraction",
        "for pools that do not offload",
        pool(kvCache={"memoryFraction": 0.5}, offload=OFFLOAD),
    ),
    Bad("a page of nothing", "spec.kvCache.pageTokens", "too small", pool(kvCache={"pageTokens": 0})),
    Bad("an unknown order", "spec.scheduler.queue", "one of", pool(scheduler={"queue": "lifo"})),
    Bad(
        "more sequences than tokens",
        "spec.scheduler.maxBatchTokens",
        "must be at least maxSequences",
        pool(scheduler={"maxSequences": 600}),
    ),
    Bad("a model in no part", "spec.parallelism.tensor", "too small", pool(parallelism={"tensor": 0})),
    Bad("a stage for each token", "spec.parallelism.pipeline", "too large", pool(parallelism={"pipeline": 65})),
    Bad(
        "more than 64 ranks", "spec.parallelism.pipeline", "at most 64", pool(parallelism={"tensor": 8, "pipeline": 9})
    ),
    Bad("an offload pool without budgets", "spec.offload.mode", "needs deviceBytes", pool(offload={"mode": "Auto"})),
    Bad("an offload mode", "spec.offload.mode", "one of", pool(offload={"mode": "On"})),
    Bad("bytes in words", "spec.offload.deviceBytes", "no quantity", pool(offload=OFFLOAD | {"deviceBytes": "four"})),
    Bad("a disk path that climbs", "spec.offload.diskPath", "pattern", pool(offload=OFFLOAD | {"diskPath": "/a/../b"})),
    Bad("a host tier in words", "spec.offload.hostBytes", "no quantity", pool(offload=OFFLOAD | {"hostBytes": "one"})),
    Bad("KV in int8", "spec.offload.kv", "one of", pool(offload=OFFLOAD | {"kv": "int8"})),
    Bad("attention on the host", "spec.offload.cpuAttention", "one of", pool(offload=OFFLOAD | {"cpuAttention": "On"})),
    Bad(
        "sparse attention",
        "spec.offload.sparseAttention",
        "one of",
        pool(offload=OFFLOAD | {"sparseAttention": "TopP"}),
    ),
    Bad("weights of two bits", "spec.offload.weights", "one of", pool(offload=OFFLOAD | {"weights": "int2"})),
    Bad(
        "tensor ranks that offload", "spec.offload", "do not offload", pool(offload=OFFLOAD, parallelism={"tensor": 2})
    ),
    Bad(
        "a device larger than the pod",
        "spec.offload",
        "above the template's limit",
        pool(offload=OFFLOAD, template={"resources": {"limits": {"memory": "3Gi"}}}),
    ),
    Bad(
        "a device and a host that are together larger than the pod",
        "spec.offload",
        "above the template's limit",
        pool(offload=OFFLOAD | {"hostBytes": "4Gi"}, template={"resources": {"limits": {"memory": "7Gi"}}}),
    ),
    Bad("an unknown phase", "spec.phases.mode", "one of", pool(phases={"mode": "Disaggregated"})),
    Bad("fewer than no prompt runner", "spec.phases.minPrompt", "too small", pool(phases={"minPrompt": -1})),
    Bad(
        "more runners of one role than runners",
        "spec.phases",
        "more than autoscaling.maxReplicas",
        pool(phases={"mode": "Split", "minToken": 3}, autoscaling={"maxReplicas": 3}),
    ),
    Bad(
        "a group of an unknown phase", "spec.runnerGroups[0].phase", "one of", grouped({"name": "a", "phase": "Mixed"})
    ),
    Bad(
        "groups for prompts alone",
        "spec.runnerGroups",
        "nobody is left for the other one",
        grouped({"name": "a", "phase": "Prompt"}, {"name": "b", "phase": "Prompt"}, phases={"mode": "Split"}),
    ),
    Bad("a token in no time", "spec.slo.tokenTimeMs", "too small", pool(slo={"tokenTimeMs": 0})),
    Bad("too late without a time", "spec.slo.admission", "needs ttftMs", pool(slo={"admission": "Reject"})),
    Bad("a tenant without a share", "spec.scheduler.fairness.weights.a", "too small", _weights(a=0)),
    Bad("a weight of no namespace", "spec.scheduler.fairness.weights", "no namespace", _weights(A_b=1)),
    Bad("no prompt at all", "spec.scheduler.maxPrefills", "too small", pool(scheduler={"maxPrefills": 0})),
    Bad(
        "an unknown parser",
        "spec.model.toolCallParser",
        "one of",
        pool(model={"uri": "file:base", "toolCallParser": "own"}),
    ),
    Bad("drained at once", "spec.drainSeconds", "too small", pool(drainSeconds=0)),
    Bad("an unknown sharing", "spec.allowedNamespaces.from", "one of", pool(allowedNamespaces={"from": "Some"})),
    Bad("a list without names", "spec.allowedNamespaces.names", _NAMES, pool(allowedNamespaces={"from": "List"})),
    Bad(
        "an empty list of names",
        "spec.allowedNamespaces.names",
        _NAMES,
        pool(allowedNamespaces={"from": "List", "names": []}),
    ),
    Bad("names without a list", "spec.allowedNamespaces.names", _NAMES, pool(allowedNamespaces={"names": ["a"]})),
    Bad(
        "a namespace in capitals",
        "spec.allowedNamespaces.names[1]",
        _LABEL,
        pool(allowedNamespaces={"from": "List", "names": ["a", "B"]}),
    ),
    Bad(
        "too many namespaces",
        "spec.allowedNamespaces.names",
        "too many",
        pool(allowedNamespaces={"from": "List", "names": [f"n{i}" for i in range(257)]}),
    ),
    Bad("a group without a name", "spec.runnerGroups[0].name", "missing", grouped({"minRunners": 1})),
    Bad("a group's name in capitals", "spec.runnerGroups[0].name", _LABEL, grouped({"name": "A100"})),
    Bad("two groups of one name", "spec.runnerGroups", "twice", grouped({"name": "a"}, {"name": "a"})),
    Bad("nine groups", "spec.runnerGroups", "too many", grouped(*({"name": f"g{i}"} for i in range(9)))),
    Bad(
        "a group's least above its most",
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
    Bad(
        "a volume",
        "spec.template.volumes",
        "unknown field",
        templated(volumes=[{"name": "etc", "hostPath": {"path": "/etc"}}]),
    ),
    Bad(
        "a security context",
        "spec.template.securityContext",
        "unknown field",
        templated(securityContext={"runAsUser": 0}),
    ),
    Bad(
        "a service account", "spec.template.serviceAccountName", "unknown field", templated(serviceAccountName="admin")
    ),
    Bad("a command", "spec.template.command", "unknown field", templated(command=["sh"])),
    Bad("an image with a space", "spec.template.image", "pattern", templated(image="weft runner")),
    Bad(
        "an amount in words",
        "spec.template.resources.limits.cpu",
        "no quantity",
        templated(resources={"limits": {"cpu": "two"}}),
    ),
    Bad(
        "a truth as an amount",
        "spec.template.resources.limits.cpu",
        "no amount",
        templated(resources={"limits": {"cpu": True}}),
    ),
    Bad(
        "an amount below zero",
        "spec.template.resources.limits.cpu",
        "negative",
        templated(resources={"limits": {"cpu": -1}}),
    ),
    Bad(
        "more asked for than allowed",
        "spec.template.resources.requests",
        "requests may not be above limits",
        templated(resources={"limits": {"memory": "1Gi"}, "requests": {"memory": "1025Mi"}}),
    ),
    Bad("a variable twice", "spec.template.env", "twice", templated(env=[{"name": "A"}, {"name": "A", "value": "b"}])),
    Bad(
        "a variable from a Secret",
        "spec.template.env[0].valueFrom",
        "unknown field",
        templated(env=[{"name": "A", "valueFrom": {}}]),
    ),
    Bad("a variable's name with '='", "spec.template.env[0].name", "pattern", templated(env=[{"name": "A=B"}])),
    Bad(
        "a label of the operator",
        "spec.template.labels",
        _RESERVED,
        templated(labels={"serving.weft.dev/pool": "other"}),
    ),
    Bad(
        "an annotation of the operator",
        "spec.template.annotations",
        _RESERVED,
        templated(annotations={"controller.kubernetes.io/pod-deletion-cost": "1"}),
    ),
    Bad("a label's value with a space", "spec.template.labels.a", "pattern", templated(labels={"a": "b c"})),
    Bad(
        "a priority of the cluster's own",
        "spec.template.priorityClassName",
        "are the cluster's own",
        templated(priorityClassName="system-node-critical"),
    ),
    Bad("a label's key with a space", "spec.template.labels", "no label key", templated(labels={"a b": "c"})),
    Bad(
        "an unknown effect",
        "spec.template.tolerations[0].effect",
        "one of",
        templated(tolerations=[{"effect": "Never"}]),
    ),
    Bad(
        "an unknown policy of spreading",
        "spec.template.topologySpreadConstraints[0].whenUnsatisfiable",
        "one of",
        templated(topologySpreadConstraints=[{"topologyKey": "zone", "whenUnsatisfiable": "Never"}]),
    ),
    Bad(
        "a liking beyond its scale",
        "spec.template.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight",
        "too large",
        templated(
            affinity={
                "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 101, "preference": {}}]}
            }
        ),
    ),
    Bad(
        "no way to compare",
        "spec.runnerGroups[0].template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        ".nodeSelectorTerms[0].matchExpressions[0].operator",
        "missing",
        grouped(
            {
                "name": "a",
                "template": {
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {
                                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu"}]}]
                            }
                        }
                    }
                },
            }
        ),
    ),
)

# On the right side of each bound: both judges take them.
GOOD: dict[str, Manifest] = {
    "autoscaling between equal bounds": scaled(minReplicas=4),
    "to zero": scaled(minReplicas=0, idleSeconds=1, wakeSeconds=3600),
    "as many runners of one role as there may be": pool(
        phases={"mode": "Split", "minToken": 2}, autoscaling={"maxReplicas": 3}
    ),
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
    "no groups": grouped(autoscaling={"maxReplicas": 4}),
    "as many sequences as tokens": pool(scheduler={"maxSequences": 512}),
    "requests at the limits": templated(resources={"limits": {"cpu": "1500m"}, "requests": {"cpu": "1.5"}}),
    "requests just below the limits": templated(resources={"limits": {"cpu": 1}, "requests": {"cpu": "999m"}}),
    "a binary gigabyte above a decimal one": templated(resources={"limits": {"a": "1Gi"}, "requests": {"a": "1G"}}),
    "requests of what has no limit": templated(resources={"limits": {"memory": "1Gi"}, "requests": {"cpu": 8}}),
    "a private repository": source(uri="hf:acme/upper/sub", revision="v1.0", credentialsRef={"name": "hub.token"}),
    "a bucket elsewhere": source(uri="s3://bucket", endpoint="http://[::1]:9000", credentialsRef={"name": "key"}),
    "a claim's root": source(uri="pvc:claim"),
    "63 letters": adapter("a" * 63),
}

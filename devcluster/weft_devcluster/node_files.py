"""Configuration files of a node's programs, as values of one network and one folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft_devcluster.bag import Network
from weft_devcluster.certificates import Pair
from weft_devcluster.image import PAUSE_IMAGE
from weft_devcluster.machine import CNI_PLUGINS

DOMAIN = "cluster.local"
NODE_NAME = "weft-node"
STORAGE_CLASS = "weft-local"


def containerd(folder: Path) -> str:
    """Write TOML. `restrict_oom_score_adj`: the score may not be lowered where the tests themselves are confined."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{folder}/containerd"
state = "{folder}/state"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[grpc]
address = "{folder}/containerd.sock"
[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[{cri}.containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
SystemdCgroup = false
[{cri}.cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{folder}/cni"
"""


def cni(folder: Path, network: Network) -> str:
    """Write a network in which every pod has a cable of its own to the node (`ptp`, not `bridge`): Services then see
    both directions of a connection between two pods without `br_netfilter`."""
    ranges = [[{"subnet": str(network.pods)}]]
    ipam = {"type": "host-local", "dataDir": f"{folder}/addresses", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
    cables = {"type": "ptp", "ipMasq": False, "ipam": ipam}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "weft", "plugins": [cables, ports]})


def kubelet(folder: Path, network: Network, ca: Path, serving: Pair, cgroup: str) -> str:
    """Write a KubeletConfiguration for a node that shares its machine: cgroups below the bag's own, nothing evicted."""
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
            "address": network.node,
            "tlsCertFile": str(serving.crt),
            "tlsPrivateKeyFile": str(serving.key),
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(ca)}},
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [network.node],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            "podCIDR": str(network.pods),
            "podLogsDir": f"{folder}/pods",
            "volumePluginDir": f"{folder}/volume-plugins",
            "cgroupRoot": f"/{cgroup}",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "registerNode": True,
            "serializeImagePulls": False,
            "syncFrequency": "10s",
            "enableServer": True,
        }
    )


def corefile(network: Network, kubeconfig: Path) -> str:
    """Write names of the cluster only: every other name is NXDOMAIN at once."""
    return f"""{DOMAIN}:53 in-addr.arpa:53 {{
    bind {network.node}
    errors
    ready {network.node}:8181
    kubernetes {DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
.:53 {{
    bind {network.node}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def dns_rights(user: str) -> list[Mapping[str, Any]]:
    """Make what CoreDNS may read, for a user of that name."""
    group = "rbac.authorization.k8s.io"
    reads = ["list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": reads},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
    ]
    meta = {"name": "weft-test-dns"}
    reference = {"apiGroup": group, "kind": "ClusterRole", "name": meta["name"]}
    subjects = [{"apiGroup": group, "kind": "User", "name": user}]
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": reference,
            "subjects": subjects,
        },
    ]


def storage(folder: Path, count: int) -> list[dict[str, Any]]:
    """Make a default StorageClass and `count` volumes of this node for whatever claims come; `fsGroup` works on
    them."""
    made: list[dict[str, Any]] = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    ]
    return made + [_volume(folder / f"volume-{number}", f"weft-volume-{number}") for number in range(count)]


def _volume(path: Path, name: str) -> dict[str, Any]:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }

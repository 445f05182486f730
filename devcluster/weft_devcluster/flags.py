"""The flags of a control plane's programs: values in, flags out."""

from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from weft_devcluster.certificates import Pair

PROXY_CLIENT = "front-proxy-client"

AUDIT_POLICY = {  # every writing request, once it is answered
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that nobody but the control plane itself talks to, on loopback."""

    etcd: int
    peers: int
    controllers: int


@dataclass(frozen=True, slots=True)
class Serving:
    """The address of the API server, what pods are told of it, and the network of Services."""

    address: str
    port: int
    advertised: str
    services: str


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that the API server shows and believes."""

    serving: Pair
    kubelet: Pair
    proxy: Pair
    client_ca: Path
    proxy_ca: Path
    tokens: Path
    signing_key: Path


def etcd(folder: Path, ports: Ports) -> list[str]:
    """Make the flags of one member that forgets with its folder: nothing is flushed to the disk."""
    client, peer = f"http://127.0.0.1:{ports.etcd}", f"http://127.0.0.1:{ports.peers}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(serving: Serving, ports: Ports, made: Credentials) -> list[str]:
    """Make flags that are strict where clusters may be: RBAC, Pod Security, and who blocks an owner's deletion has to
    be allowed to."""
    return [
        f"--etcd-servers=http://127.0.0.1:{ports.etcd}",
        f"--bind-address={serving.address}",
        f"--secure-port={serving.port}",
        f"--advertise-address={serving.advertised}",
        f"--service-cluster-ip-range={serving.services}",
        f"--tls-cert-file={made.serving.crt}",
        f"--tls-private-key-file={made.serving.key}",
        f"--client-ca-file={made.client_ca}",
        f"--kubelet-certificate-authority={made.client_ca}",
        f"--kubelet-client-certificate={made.kubelet.crt}",
        f"--kubelet-client-key={made.kubelet.key}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--token-auth-file={made.tokens}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
        f"--service-account-key-file={made.signing_key}",
        f"--service-account-signing-key-file={made.signing_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--allow-privileged=true",
        f"--requestheader-client-ca-file={made.proxy_ca}",
        f"--requestheader-allowed-names={PROXY_CLIENT}",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={made.proxy.crt}",
        f"--proxy-client-key-file={made.proxy.key}",
        "--enable-aggregator-routing=true",
        "--profiling=false",
    ]


def serving_names(address: str, services: str) -> list[str]:
    """The names and addresses by which the API server is called: from this machine, and from pods."""
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += ["kubernetes.default.svc.cluster.local", "127.0.0.1", address, str(IPv4Network(services)[1])]
    return list(dict.fromkeys(names))


def controller_manager(kubeconfig: Path, ports: Ports, ca: Path, signing_key: Path) -> list[str]:
    """Make flags by which each controller is a user of its own, so the audit log tells them apart; the HPA is quick."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={ports.controllers}",
        f"--service-account-private-key-file={signing_key}",
        f"--root-ca-file={ca}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--horizontal-pod-autoscaler-downscale-stabilization=5s",
        "--profiling=false",
    ]


def scheduler(kubeconfig: Path, port: int) -> list[str]:
    """Make the flags of kube-scheduler, on loopback."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
    ]

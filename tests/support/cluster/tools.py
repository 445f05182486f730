"""What a test cluster is made of: every version in one place, and where the built tools lie.

They lie below `${XDG_CACHE_HOME:-~/.cache}/weft/cluster-tools/VERSIONS/bin`, outside of git; VERSIONS is a digest of
everything that decides what the build gives, so a changed version never meets an old binary. `make cluster-tools`.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from cluster.errors import ToolMissing

KUBERNETES = "v1.35.4"
PAUSE = "pause"
SOURCES = Path(__file__).parent / "tools"


class Module(NamedTuple):
    """A Go program: `package` at `version`. Those with a `folder` have a go.mod of their own below `tools/`."""

    name: str
    package: str
    version: str
    folder: str | None = None
    stamp: str = ""


_VERSION = "k8s.io/component-base/version"
_STAMP = f"-X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=35"


def _kubernetes(name: str) -> Module:
    return Module(name, f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, "kubernetes", _STAMP)


CONTROL_PLANE = (
    _kubernetes("kube-apiserver"),
    _kubernetes("kubectl"),
    _kubernetes("kube-controller-manager"),
    Module("etcd", "go.etcd.io/etcd/server/v3", "v3.6.5", "etcd"),
)
NODE = (
    _kubernetes("kubelet"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kube-proxy"),
    Module("coredns", "github.com/coredns/coredns", "v1.13.1"),
)
CHART = (
    Module("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", "v0.7.0"),
    Module("helm", "helm.sh/helm/v3/cmd/helm", "v3.19.0"),
)
DEPOT = (Module("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),)
MODULES = CONTROL_PLANE + NODE + CHART + DEPOT


def folder() -> Path:
    """Where the tools of these versions lie, built or not."""
    return cache() / "cluster-tools" / _versions() / "bin"


def cache() -> Path:
    """What is kept between runs and can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def path(name: str) -> Path:
    """A built tool. Raises ToolMissing."""
    found = folder() / name
    if not found.is_file():
        raise ToolMissing(f"{name} is not built ({found}): run `make cluster-tools`")
    return found


def _versions() -> str:
    parts = [f"{module.name} {module.package} {module.version} {module.stamp}" for module in MODULES]
    files = [SOURCES / f"{PAUSE}.c", *sorted(SOURCES.glob("*/go.mod"))]
    digest = hashlib.sha256("\n".join(parts + [file.read_text() for file in files]).encode())
    return f"{KUBERNETES}-{digest.hexdigest()[:8]}"

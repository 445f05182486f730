"""The tools that a test cluster is made of: every version in one place, and where the built tools lie.

Each lies below `${XDG_CACHE_HOME:-~/.cache}/weft/cluster-tools/NAME-DIGEST`, outside of git. DIGEST is of everything
that decides what the build gives, so a changed version never meets an old binary, and a changed tool leaves the others
where they are. `make cluster-tools`.

Kubernetes and what shares most of its packages with it are one Go module (`tools`): they are compiled together, and
each package once. What needs newer packages of Kubernetes is another module (`newer`).

`WEFT_CLUSTER=newer` chooses the newest Kubernetes and Helm 4, for the build and for whoever asks where a tool lies.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from weft_devcluster.errors import ToolMissing

PAUSE = "pause"
MODULES = Path(__file__).parent
KUBERNETES = "kube-apiserver", "kube-controller-manager", "kubectl"


class Tool(NamedTuple):
    """A Go program: `package` at `version`; without one, a package that `module` below MODULES has or requires."""

    name: str
    package: str
    version: str = ""
    module: str = "tools"


TOOLS = (
    *(Tool(name, f"k8s.io/kubernetes/cmd/{name}") for name in KUBERNETES),
    *(Tool(name, f"k8s.io/kubernetes/cmd/{name}") for name in ("kubelet", "kube-scheduler", "kube-proxy")),
    Tool("etcd", "./etcd"),
    Tool("coredns", "./coredns"),
    Tool("helm", "helm.sh/helm/v3/cmd/helm", module="newer"),
    Tool("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),
    Tool("registry", "github.com/distribution/distribution/v3/cmd/registry", "v3.0.0"),
)
NEWER = (  # in place of those of the same names
    *(Tool(name, f"k8s.io/kubernetes/cmd/{name}", module="newer") for name in KUBERNETES),
    Tool("helm", "helm.sh/helm/v4/cmd/helm", module="newer"),
)


class Definitions(NamedTuple):
    """CustomResourceDefinitions in the Go module of another project: `files` below its root."""

    module: str
    version: str
    files: tuple[str, ...]


_MONITORS = ("podmonitors", "prometheusrules", "servicemonitors")
ELSEWHERE = (
    Definitions("github.com/cert-manager/cert-manager", "v1.21.2", ("deploy/crds/*.yaml",)),
    Definitions(
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        tuple(f"example/prometheus-operator-crd/monitoring.coreos.com_{name}.yaml" for name in _MONITORS),
    ),
    Definitions(
        "sigs.k8s.io/gateway-api", "v1.6.3", ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",)
    ),
)


def chosen() -> dict[str, Tool]:
    """The tools that are in use, by their names."""
    newer = NEWER if os.environ.get("WEFT_CLUSTER") == "newer" else ()
    return {tool.name: tool for tool in (*TOOLS, *newer)}


def kubernetes() -> str:
    """The version of Kubernetes."""
    return _kubernetes_of(chosen()["kube-apiserver"].module)


def go_flags(module: str = "tools") -> list[str]:
    """The flags by which Go programs are built: nothing for debuggers (an eighth of the time)."""
    at, version = "k8s.io/component-base/version", _kubernetes_of(module)
    minor = version.split(".")[1]
    stamp = f"-X {at}.gitVersion={version} -X {at}.gitMajor=1 -X {at}.gitMinor={minor}"
    return ["-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags", f"-s -w {stamp}"]


def pause_flags() -> list[str]:
    return ["-Os", "-static"]


def cache() -> Path:
    """The folder of what is kept between runs and can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def folder() -> Path:
    """The folder of all tools, in all versions that were built."""
    return cache() / "cluster-tools"


def place(name: str) -> Path:
    """The place of a tool of this version, built or not."""
    return folder() / f"{name}-{_digest(name)}" / name


def path(name: str) -> Path:
    """Find a built tool. Raises ToolMissing."""
    found = place(name)
    if not found.is_file():
        raise ToolMissing(f"{name} is not built ({found}): run `make cluster-tools`")
    return found


def client(name: str) -> Path:
    """Find kubectl or helm: the built one, or else that of the PATH. Raises ToolMissing."""
    built, found = place(name), shutil.which(name)
    return path(name) if built.is_file() or found is None else Path(found)


def definitions() -> list[Path]:
    """Find the CRD files of other projects that the chart has objects for. Raises ToolMissing."""
    return [path for of in ELSEWHERE for path in definitions_of(of)]


def definitions_of(of: Definitions) -> list[Path]:
    """Find CRD files in Go's cache of modules. Raises ToolMissing."""
    go = shutil.which("go")
    if go is None:
        raise ToolMissing("Go is not installed: apt-get install golang-go, or https://go.dev/dl")
    command = [go, "env", "GOMODCACHE"]
    root = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    folder = root / f"{of.module}@{of.version}"
    found = [path for pattern in of.files for path in sorted(folder.glob(pattern))]
    if len(found) < len(of.files):
        raise ToolMissing(f"{of.module} {of.version} is not downloaded ({folder}): run `make cluster-tools`")
    return found


def _kubernetes_of(module: str) -> str:
    text = (MODULES / module / "go.mod").read_text()
    found = re.search(r"^\s*k8s\.io/kubernetes (v1\.\d+\.\d+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def _digest(name: str) -> str:
    if name == PAUSE:
        parts = [*pause_flags(), (MODULES / "tools" / f"{PAUSE}.c").read_text()]
    else:
        tool = chosen()[name]
        parts = [*go_flags(tool.module), *tool[:3], *_sources_of(tool)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _sources_of(tool: Tool) -> list[str]:
    if tool.version:
        return []
    module = MODULES / tool.module
    own = sorted((module / tool.package).glob("*.go"))  # none for a package of others
    return [path.read_text() for path in (module / "go.mod", module / "go.sum", *own)]

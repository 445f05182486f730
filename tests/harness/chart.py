"""The chart as Helm renders it, and the golden renders. `python -m harness.chart` (`make golden`) writes them again."""

import difflib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cluster.cluster import Cluster
from weft_devcluster import tools
from weft_devcluster.errors import ToolMissing

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "weft"
GOLDEN = ROOT / "tests" / "integration" / "chart" / "golden"
CI_SETS = ("default", "dev", "postgres", "cert-manager", "gpu-pools", "minimal")
PROFILES = ("profile-dev", "profile-small", "profile-production")
OTHERS_SETS = ("cert-manager", "profile-production")  # with objects of other projects' kinds
VALUE_SETS = (*CI_SETS, *PROFILES)
PLAIN_SETS = ("dev", "minimal", "profile-dev")  # without TLS
OPEN_SETS = ("minimal", "profile-dev")  # without network policies
GOLDEN_SETS = ("default", "cert-manager")  # what nearly everybody gets, and the one with most of it on
NAMESPACE = "weft-system"
QUICK = ("--set", "tls.mode=none,admission.enabled=false")  # a render that makes no keys
HTTP_ROUTE = (  # with everything that it can have
    "--set-json",
    'gateway.httpRoute={"enabled": true, "hostnames": ["weft.example.com"], '
    '"parentRefs": [{"name": "edge", "namespace": "infra", "sectionName": "https"}], '
    '"rules": [{"matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}], "timeouts": {"request": "0s"}, '
    '"filters": [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-internal"]}}]}]}',
)
MAX_COLUMNS = 1 << 20  # no line of a golden render is broken
COMPONENTS = ("gateway", "operator", "scheduler", "supervisor", "predictor", "depot", "batch")
_ELSEWHERE = "monitoring.coreos.com/v1,gateway.networking.k8s.io/v1"  # APIs that Kubernetes itself has not
KUBERNETES = ("--kube-version", tools.kubernetes(), "--api-versions", _ELSEWHERE)
_COPY = re.compile(r"# Source: weft/templates/(crds|dashboards)\.yaml")
_MADE = re.compile(r"(tls\.crt|tls\.key|ca\.crt|caBundle|serving\.weft\.dev/renew-after): \S+")


class HelmRefused(Exception):
    """What Helm said instead of rendering."""


def values_of(name: str) -> Path:
    """The file of a value set."""
    if name in PROFILES:
        return CHART / "profiles" / f"{name.removeprefix('profile-')}.yaml"
    return CHART / "ci" / f"{name}-values.yaml"


def helm(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run helm. Raises HelmRefused, ToolMissing."""
    done = subprocess.run([tools.client("helm"), *arguments], capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise HelmRefused(done.stderr or done.stdout)
    return done.stdout


@cache
def helm_major() -> int:
    """The major version of Helm."""
    return int(helm("version", "--short").removeprefix("v").partition(".")[0])


@cache
def render(name: str, *flags: str | Path, namespace: str = NAMESPACE) -> str:
    """The manifests of a value set, as text. Each is made once in a process."""
    where = ("--namespace", namespace, *KUBERNETES, "-f", values_of(name))
    return helm("template", "weft", CHART, *where, *flags)


def lint(name: str) -> str:
    """`helm lint --strict`. It knows no API but Kubernetes' own, so nothing is asked of the Prometheus operator."""
    known = ("--kube-version", tools.kubernetes(), "--set", "podMonitor.enabled=false,prometheusRule.enabled=false")
    return helm("lint", "--strict", *known, CHART, "-f", values_of(name))


def objects(text: str) -> list[Json]:
    """Rendered text -> objects. By libyaml: 300 kB take 0.09 s instead of 0.8."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def one(found: Sequence[Json], kind: str, name: str, namespace: str | None = None) -> Json:
    """The one object of that kind and name."""
    (only,) = [
        obj
        for obj in found
        if obj["kind"] == kind
        and obj["metadata"]["name"] == name
        and namespace in (None, obj["metadata"].get("namespace"))
    ]
    return only


def create_others(plane: Cluster) -> None:
    """Create the CRDs of cert-manager, the Prometheus operator and the Gateway API. Skips where they cannot be had."""
    try:
        files = tools.definitions()
    except ToolMissing as error:
        pytest.skip(str(error))
    for path in files:
        plane.kubectl("create", "-f", path)
    plane.wait("--for=condition=Established", "crd", "--all")


def pod_templates(found: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    """Name and pod template (metadata, spec) of everything that makes pods, the test's pod included."""
    for obj in found:
        if obj["kind"] in ("Deployment", "StatefulSet"):
            yield obj["metadata"]["name"], obj["spec"]["template"]
        elif obj["kind"] == "Pod":
            yield obj["metadata"]["name"], {"metadata": obj["metadata"], "spec": obj["spec"]}


def arguments_of(found: Sequence[Json], component: str) -> list[str]:
    """The arguments of a component's process."""
    for name, template in pod_templates(found):
        if name == f"weft-{component}":
            return template["spec"]["containers"][0]["args"]
    raise LookupError(component)


def golden(text: str) -> str:
    """A render's objects in the order of their names: Helm 3 and 4 differ in order and in empty lines.

    Without what is drawn anew each time, and without copies of files: CRDs and dashboards.
    """
    documents = [text for text in re.split(r"(?m)^---\n", text) if not _COPY.search(text)]
    kept = sorted(objects("---\n".join(documents)), key=lambda obj: (obj["kind"], *_place(obj)))
    return _MADE.sub(r"\1: MADE", yaml.dump_all(kept, Dumper=yaml.CSafeDumper, explicit_start=True, width=MAX_COLUMNS))


def _place(obj: Json) -> tuple[str, str]:
    return obj["metadata"]["name"], obj["metadata"].get("namespace", "")


def goldens() -> Iterator[tuple[Path, str]]:
    """Each golden file, and what should be in it. A profile's has what it changes of the default render."""
    for name in GOLDEN_SETS:
        yield GOLDEN / f"{name}.yaml", golden(render(name))
    default = golden(render("default")).splitlines(keepends=True)
    for name in PROFILES:
        lines = golden(render(name)).splitlines(keepends=True)
        yield GOLDEN / f"{name}.diff", "".join(difflib.unified_diff(default, lines, "default", name, n=1))


def main() -> int:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for path, text in goldens():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

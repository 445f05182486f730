"""One way into an API server: kubectl, objects as values, a client of the `kubernetes` package."""

import os
import subprocess
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client as kubernetes_client
from kubernetes.config import new_client_from_config

from weft_devcluster import tools
from weft_devcluster.access import Access, Endpoint
from weft_devcluster.errors import Refused
from weft_devcluster.objects import Objects, path_of
from weft_devcluster.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
APPLY = "application/apply-patch+yaml"
MANAGER = "test"
KUBECTL_S = 300.0  # ends a hang


class Api:
    """A way into an API server as its admin. `folder` takes the kubeconfigs that are made."""

    folder: Path
    endpoint: Endpoint
    admin: Access

    @property
    def kubeconfig(self) -> Path:
        """The admin's kubeconfig."""
        return self.admin.kubeconfig

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def ca(self) -> Path:
        return self.endpoint.ca

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, by: Access | None = None, timeout_s: float = KUBECTL_S
    ) -> str:
        """Run kubectl (as the admin, or `by` somebody); returns its output. Raises Refused."""
        command = [str(tools.client("kubectl")), f"--kubeconfig={(by or self.admin).kubeconfig}", *map(str, arguments)]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False,
                env=self.environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace").strip().rpartition("\n")[2]
            raise Refused(" ".join(command[2:]), f"no end after {timeout_s:.0f} s; its last line: {said!r}") from error
        if done.returncode != 0:
            raise Refused(" ".join(command[2:]), done.stderr or done.stdout)
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """The environment of kubectl and helm: what they learn of this server stays beside its kubeconfig."""
        return {**os.environ, "KUBECACHEDIR": str(self.folder / "kubectl-cache")}

    @cached_property
    def objects(self) -> Objects:
        """The same way in, without a process for each question."""
        return Objects(self.client(), self.folder)

    def get(
        self, kinds: str, name: str = "", namespace: str = "", *, selector: str = "", fields: str = ""
    ) -> dict[str, Any]:
        """Get an object, or (without a name) all of one or several kinds A,B, in a namespace or everywhere.

        Raises Refused, also for an object that is not there.
        """
        if name:
            return self.objects.request("GET", path_of(self.objects.resource(kinds), namespace, name))
        asked = {"labelSelector": selector, "fieldSelector": fields}
        query = {option: value for option, value in asked.items() if value}
        items: list[dict[str, Any]] = []
        for kind in kinds.split(","):
            resource = self.objects.resource(kind)
            found = self.objects.request("GET", path_of(resource, namespace), query=query)["items"]
            items += [{"apiVersion": resource.group_version, "kind": resource.kind, **item} for item in found]
        return {"items": items}

    def wait(self, *arguments: str | Path) -> None:
        """Run `kubectl wait`, which watches."""
        self.kubectl("wait", *arguments, f"--timeout={PATIENCE_S:.0f}s")

    def wait_until(
        self, kind: str, name: str, namespace: str, holds: Callable[[dict[str, Any]], bool], what: str
    ) -> None:
        """Watch until there is such an object of which it holds. Raises TimeoutError."""
        self.objects.until(
            kind, name, namespace, lambda found: found is not None and holds(found), f"{kind}/{name} {what}"
        )

    def apply(self, *objects: Mapping[str, Any], manager: str = MANAGER, dry_run: bool = False) -> list[dict[str, Any]]:
        """Apply manifests given as values: server-side, forced and strict. Returns the objects as they are then."""
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        return [self.objects.request("PATCH", self.path_of(obj), obj, content=APPLY, query=query) for obj in objects]

    def path_of(self, obj: Mapping[str, Any]) -> str:
        resource = self.objects.resource(f"{obj['kind']}.{obj['apiVersion']}")
        meta = obj["metadata"]
        return path_of(resource, meta.get("namespace", "default"), meta["name"])

    def client(self, by: Access | None = None) -> kubernetes_client.ApiClient:
        """Make a client of the `kubernetes` package, with a pool of connections of its own: close it."""
        access = by or self.admin
        if not access.token:  # a certificate, or a program that gives tokens
            return new_client_from_config(str(access.kubeconfig))
        configuration = kubernetes_client.Configuration()
        configuration.host, configuration.ssl_ca_cert = self.url, str(self.ca)
        configuration.api_key = {"authorization": f"Bearer {access.token}"}
        return kubernetes_client.ApiClient(configuration)

    def apply_crds(self) -> None:
        """Apply our CRDs and wait until the API server serves them."""
        for made in self.apply(*definitions()):
            self.wait_until(made["kind"], made["metadata"]["name"], "", is_so("Established"), "is served")


def definitions() -> list[dict[str, Any]]:
    """Read this checkout's CRDs."""
    return [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]


def is_so(condition: str, status: str = "True") -> Callable[[dict[str, Any]], bool]:
    """Make the test whether a condition has this status for the present generation, as `kubectl wait` judges it."""

    def judge(obj: dict[str, Any]) -> bool:
        told: dict[str, Any] = obj.get("status") or {}
        found = next((one for one in told.get("conditions") or () if one["type"] == condition), {"status": None})
        generation = obj["metadata"].get("generation", 0)
        of = found.get("observedGeneration", told.get("observedGeneration", generation))
        return found["status"] == status and of >= generation

    return judge

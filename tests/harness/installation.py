"""The chart on a cluster, used as a platform team and its tenants use it: helm, kubectl, the openai client."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.cluster.cluster import OURS, Cluster
from harness.cluster.place import Place
from harness.quickstart import QUICKSTART, ROOT
from harness.waiting import eventually
from weft.domain.runner import RunnerBook
from weft.wire.roles import dns_name
from weft.wire.streams import channel
from weft.wire.tls import Role, Tls
from weft.wire.v1 import supervisor_pb2_grpc
from weft_devcluster import tools
from weft_devcluster.api import is_so
from weft_devcluster.node import Node
from weft_devcluster.values import copy_sources, merged
from weft_stage.reports import books, listed
from weft_stage.scrape import scrape, total

NAMESPACE = "weft-system"
HELM_S = 300
TENANTS = ("acme", "globex", "initech")  # the quickstart's namespaces


class Installation:
    """A release named `weft` in `weft-system`. `sources` is the depot's file root: a copy of the quickstart.

    `publish()` shows the depot what a test has changed there.
    """

    def __init__(self, plane: Cluster, place: Place, folder: Path, node: Node | None = None) -> None:
        self.plane, self._place, self.folder, self._node = plane, place, folder, node
        self.sources = folder / "sources"
        copy_sources(self.sources)
        for parent in self.sources.parents[:4]:
            if str(parent).startswith("/tmp/"):
                parent.chmod(parent.stat().st_mode | 0o055)

    @property
    def node(self) -> Node:
        """The node of this machine. The calling test is skipped where there is none."""
        if self._node is None:
            pytest.skip("KUBECONFIG's nodes are not processes of this machine")
        return self._node

    def publish(self) -> None:
        self._place.publish(self.sources, NAMESPACE)

    # ------------------------------------------------------------------------------------------------- helm

    def install(self, **values: Any) -> None:
        """Run `helm install`; `values` are laid over those that a cluster of tests needs."""
        self.plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        self._place.prepare(NAMESPACE)
        self._helm("install", **values)

    def remove(self) -> None:
        """Remove the release, what was applied, and its namespaces."""
        for kind in OURS:
            self.plane.kubectl("delete", kind, "--all", "--all-namespaces")
        self.helm("uninstall", "weft", "--wait")
        for namespace in (NAMESPACE, *TENANTS):
            self.plane.delete_namespace(namespace)

    def install_quickstart(self) -> None:
        """Install, apply, and wait until every adapter is Ready and its runner, too.

        An adapter is Ready once it is in the route table: what is asked before a runner is there is held.
        """
        self.install()
        self.publish()
        self.apply_quickstart()
        self.wait_ready()
        self.plane.wait_until("spool", "quickstart", NAMESPACE, is_so("Available"), "is available")

    def upgrade(self, **values: Any) -> None:
        self._helm("upgrade", **values)

    def helm(self, *arguments: str) -> str:
        command = [str(tools.client("helm")), f"--kubeconfig={self.plane.kubeconfig}", f"--namespace={NAMESPACE}"]
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=2 * HELM_S,
            check=False,
            cwd=ROOT,
            env=self.plane.environment,
        )
        assert done.returncode == 0, done.stderr + done.stdout + self.report()
        return done.stdout

    def _helm(self, verb: str, **values: Any) -> None:
        path = self.folder / "values.json"
        path.write_text(json.dumps(merged(self.values(), values)))
        patience = f"--timeout={HELM_S}s"
        self.helm(verb, "weft", "charts/weft", f"--values={path}", "--create-namespace", "--wait", patience)

    def values(self) -> dict[str, Any]:
        """Return what the cluster needs, and an S3 endpoint where nobody listens."""
        depot = {"schemes": ["file", "s3"], "s3Endpoints": ["127.0.0.1:9"]}
        return merged(self._place.values(self.sources), {"depot": depot})

    # ------------------------------------------------------------------------------------------------- kubectl

    def apply_quickstart(self) -> None:
        """Run `kubectl apply -f examples/quickstart`, as the README says."""
        self.plane.kubectl("apply", "-f", QUICKSTART)

    def wait_ready(self, *what: str) -> None:
        """Wait until adapters (all, or those named NAMESPACE/NAME) are Ready."""
        there = [item["metadata"] for item in self.plane.get("loraadapters")["items"]]
        for name in what or [f"{meta['namespace']}/{meta['name']}" for meta in there]:
            namespace, _, adapter = name.partition("/")
            self.plane.wait_until("loraadapter", adapter, namespace, is_so("Ready"), "is ready")

    def patch_pool(self, spec: dict[str, Any]) -> None:
        """Merge a patch into the quickstart pool's spec, as `kubectl patch` does it."""
        patch = json.dumps({"spec": spec})
        self.plane.kubectl("patch", "spool", "quickstart", "-n", NAMESPACE, "--type=merge", "-p", patch)

    def scale_gateway(self, replicas: int) -> None:
        self.plane.kubectl("scale", "deployment/weft-gateway", "-n", NAMESPACE, f"--replicas={replicas}")

    def pods(self, selector: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """Return the pods that are not on their way out."""
        found = self.plane.get("pods", namespace=namespace, selector=selector)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def names(self, component: str) -> list[str]:
        """Return the names of a component's pods."""
        return sorted(pod["metadata"]["name"] for pod in self.pods(f"app.kubernetes.io/component={component}"))

    def ready(self, component: str) -> list[str]:
        """Return the names of a component's Ready pods."""
        found = self.pods(f"app.kubernetes.io/component={component}")
        return sorted(pod["metadata"]["name"] for pod in found if is_ready(pod))

    def report(self) -> str:
        """Return everything one wants to see after a failure."""
        parts = [
            self.plane.kubectl("get", "pods,deployments,statefulsets,servingpools,loraadapters", "-A", "-o", "wide"),
            self.plane.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp"),
        ]
        return "\n".join(parts)

    # ------------------------------------------------------------------------------------------------- clients

    @property
    def url(self) -> str:
        """The gateway's Service, from this machine."""
        return f"http://{self.reach('service/weft-gateway', self._port('weft-gateway'))}"

    def reach(self, target: str, port: int) -> str:
        """Return HOST:PORT for a port of `service/NAME` or `pod/NAME` of the release's namespace."""
        return self._place.reach(NAMESPACE, target, port)

    def _port(self, service: str) -> int:
        return self.plane.get("service", service, NAMESPACE)["spec"]["ports"][0]["port"]

    async def runners(self) -> list[RunnerBook]:
        """Return the supervisor's runners."""
        async with channel(self._supervisor(), self.certificate("admin"), "supervisor") as open_channel:
            return books(await listed(supervisor_pb2_grpc.AdminStub(open_channel)))

    def supervisor_channel(self) -> grpc.Channel:
        """Return a channel for a thread, with the certificate that the chart makes for people."""
        tls = self.certificate("admin").present()
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        name = [("grpc.ssl_target_name_override", dns_name("supervisor"))]
        return grpc.secure_channel(self._supervisor(), credentials, options=name)

    def _supervisor(self) -> str:
        return self.reach("service/weft-supervisor", self._port("weft-supervisor"))

    async def until_runners(self, count: int, *, max_sequences: int) -> None:
        """Wait until there are exactly `count` runners, all Ready, and all of a pod that knows this limit."""

        found: list[RunnerBook] = []

        async def there() -> bool:
            found[:] = await self.runners()
            ready = [one for one in found if one.figures.ready and not one.figures.draining]
            limits = {one.spec.max_sequences for one in ready}
            return len(ready) == len(found) == count and limits == {max_sequences}

        try:
            await eventually(there)
        except TimeoutError as error:
            shown = ", ".join(f"{one.spec.name} (limit {one.spec.max_sequences}, {one.figures})" for one in found)
            pods = self.plane.kubectl("get", "pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=runner")
            raise TimeoutError(f"not {count} runners of limit {max_sequences}, but [{shown}]; pods:\n{pods}") from error

    def pod_url(self, pod: str) -> str:
        """Return the URL of one gateway, past the Service."""
        return f"http://{self.reach(f'pod/{pod}', 8000)}"

    def metric(self, component: str, sample: str) -> float:
        """Sum a metric's samples over the pods of a component."""
        return sum(total(scrape(self.reach(f"pod/{pod}", 7401)), sample) for pod in self.names(component))

    def certificate(self, role: Role) -> Tls:
        """Return the certificate that the chart made for a role."""
        folder = self.folder / f"{role}-tls"
        if not folder.exists():
            folder.mkdir(mode=0o700)
            secret = self.plane.get("secret", f"weft-{role}-tls", NAMESPACE)
            for name, content in secret["data"].items():
                (folder / name).write_bytes(base64.b64decode(content))
        return Tls(folder, role)


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

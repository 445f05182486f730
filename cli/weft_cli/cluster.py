"""Weft in a cluster: objects through the Kubernetes API, processes through port-forwards.

Both are children of kubectl (ADR 0023), opened when they are needed and closed with the command.
"""

import base64
import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from weft_cli.client import TIMEOUT_S, Object, ObjectApi, quoted, request
from weft_cli.errors import CommandError, NotThere
from weft_cli.kubectl import Kubectl
from weft_cli.output import say, table
from weft_cli.runners import Certificate, SupervisorClient, certificate_from

API = "/apis/serving.weft.dev/v1alpha1"
MANAGER = "weft"
WATCH_S = 3600  # then the API server ends a watch, and the next one goes on
PEERS_PORT = 7400
MAX_LOGS = 50  # pods of one component
PART_OF = "app.kubernetes.io/part-of=weft"
COMPONENT = "app.kubernetes.io/component"
APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Access:
    """The choice of a cluster: kubectl's flags, and the namespace of the Helm release."""

    context: str | None
    kubeconfig: Path | None
    system_namespace: str


class ClusterStack:
    """A release of Weft in a cluster. Close it with `with`. Every method raises CommandError."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._kubectl = Kubectl(access.context, access.kubeconfig)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def api(self) -> ObjectApi:
        return self._api

    @cached_property
    def _api(self) -> "KubernetesApi":
        return KubernetesApi(self._open.enter_context(self._kubectl.proxy()))

    def namespace(self, name: str | None) -> str:
        """The namespace of the flag, else that of the context, as kubectl has it."""
        return name or self._kubectl.run("config", "view", "--minify", "-o", "jsonpath={..namespace}") or "default"

    def supervisor(self, address: str | None, tls_dir: Path | None) -> SupervisorClient:
        """Reach every supervisor that runs, each through a port-forward, with the certificate of people."""
        if address is not None:
            return SupervisorClient((address,), certificate_from(tls_dir))
        pods = [pod for pod in self._pods("supervisor") if pod["status"].get("phase") == "Running"]
        if not pods:
            raise CommandError(f"no supervisor runs in namespace {self._namespace}", "`weft status` shows the pods")
        certificate = certificate_from(tls_dir) if tls_dir or not _has_tls(pods[0]) else self._certificate()
        return SupervisorClient(tuple(self._forward(f"pod/{_name(pod)}", PEERS_PORT) for pod in pods), certificate)

    def gateway_url(self) -> str:
        """Open a port-forward to the gateway's Service."""
        service = self._service("gateway")
        return f"http://{self._forward(f'svc/{service}', 'http')}"

    def show_status(self) -> None:
        """Show every pod of the release. Raises CommandError when one is not ready."""
        gateway, pods = self._service("gateway"), self._pods()
        say(f"API        svc/{gateway} in namespace {self._namespace}: `kubectl port-forward`, or an Ingress")
        say("")
        rows = [_pod_row(pod) for pod in pods]
        say("\n".join(table(("COMPONENT", "POD", "READY", "STATE", "RESTARTS", "NOTE"), sorted(rows))))
        if any(row[2] != "True" for row in rows):
            raise CommandError("not every component is ready", f"kubectl describe pod -n {self._namespace} POD")

    def show_logs(self, component: str | None, tail: int | None, *, follow: bool) -> None:
        """Show what the pods of a component write; the components when none is named."""
        components = sorted({_component(pod) for pod in self._pods()})
        if component is None:
            return say("\n".join(components))
        if component not in components:
            raise NotThere(f"there is no component {component!r}", f"there are: {', '.join(components)}")
        selector = f"--selector={PART_OF},{COMPONENT}={component}"
        lines = [f"--tail={-1 if tail is None else tail}", *(["--follow"] if follow else [])]
        flags = [f"--namespace={self._namespace}", "--prefix", f"--max-log-requests={MAX_LOGS}"]
        if code := self._kubectl.show("logs", selector, *lines, *flags):
            raise CommandError(f"kubectl logs: exit code {code}")
        return None

    @property
    def _namespace(self) -> str:
        return self._access.system_namespace

    def _forward(self, target: str, port: str | int) -> str:
        return self._open.enter_context(self._kubectl.forward(self._namespace, target, port))

    def _pods(self, component: str = "") -> list[Object]:
        selector = f"{PART_OF},{COMPONENT}={component}" if component else PART_OF
        pods = self._api.core(self._namespace, "pods", selector)
        return pods or self._not_installed()

    def _service(self, component: str) -> str:
        services = self._api.core(self._namespace, "services", f"{PART_OF},{COMPONENT}={component}")
        if len(services) > 1:
            raise CommandError(f"namespace {self._namespace} has several {component}s of Weft", "name one with --url")
        return _name(services[0]) if services else self._not_installed()

    def _not_installed(self) -> Any:
        context = f"context {self._access.context}" if self._access.context else "this cluster"
        raise CommandError(
            f"there is no Weft in namespace {self._namespace} of {context}",
            "--system-namespace names the namespace of its Helm release",
        )

    def _certificate(self) -> Certificate:
        """Read the certificate that the release has for people, from its Secret. It is written nowhere."""
        name = f"{self._service('supervisor').removesuffix('-supervisor')}-admin-tls"
        try:
            data = self._api.secret(self._namespace, name)
            return Certificate(*(base64.b64decode(data[file]) for file in ("ca.crt", "tls.key", "tls.crt")))
        except (CommandError, KeyError) as error:
            message = error.message if isinstance(error, CommandError) else f"it has no {error}"
            raise CommandError(
                f"the supervisor asks for a certificate of an admin, and Secret {self._namespace}/{name} gives none: "
                f"{message}",
                "ask for the right to `get` that Secret, or give a folder of certificates with --tls-dir",
            ) from error


class KubernetesApi:
    """The methods of `client.Controller`, on the Kubernetes API behind a unix socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def core(self, namespace: str, plural: str, selector: str) -> list[Object]:
        """List objects of Kubernetes itself, by labels."""
        query = urlencode({"labelSelector": selector})
        return self._json("GET", f"{quoted('/api/v1/namespaces', namespace, plural)}?{query}")["items"]

    def secret(self, namespace: str, name: str) -> dict[str, str]:
        return self._json("GET", quoted("/api/v1/namespaces", namespace, "secrets", name)).get("data", {})

    def list(self, plural: str, namespace: str | None = None) -> tuple[list[Object], str]:
        """List objects; returns the version of the list, too, from which a watch may go on."""
        answer = self._json("GET", _path(plural, namespace))
        return answer["items"], answer["metadata"]["resourceVersion"]

    def get(self, plural: str, namespace: str, name: str) -> Object:
        return self._json("GET", _path(plural, namespace, name))

    def apply(self, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        """Apply objects; yields for each, in order: created, configured or unchanged, or why it is refused.

        One with a resourceVersion replaces exactly that one; others are applied as `kubectl apply --server-side` does.
        """
        for obj in objects:
            try:
                yield self._apply(obj)
            except CommandError as error:
                yield error

    def delete(self, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        """Delete objects, of which kind, namespace and name count; yields for each, in order: deleted, or why not."""
        for obj in objects:
            try:
                self._json("DELETE", _path_of(obj))
                yield "deleted"
            except CommandError as error:
                yield error

    def watch(
        self, plural: str, namespace: str | None, version: str, silence_s: float | None = None
    ) -> Iterator[Object]:
        """Yield changes after a version, without end, or until nothing has come for `silence_s`."""
        with contextlib.suppress(TimeoutError):
            while True:
                query = {"watch": 1, "resourceVersion": version, "timeoutSeconds": WATCH_S}
                with self._answer(
                    "GET", f"{_path(plural, namespace)}?{urlencode(query)}", timeout_s=silence_s
                ) as response:
                    while line := response.readline():
                        event = json.loads(line)
                        yield event
                        version = event["object"]["metadata"].get("resourceVersion", version)

    def _apply(self, obj: Object) -> str:
        meta, path = obj["metadata"], _path_of(obj)
        if "resourceVersion" in meta:
            updated = self._json("PUT", f"{path}?fieldManager={MANAGER}", obj)
            return "configured" if updated["metadata"]["resourceVersion"] != meta["resourceVersion"] else "unchanged"
        try:
            version = self._json("GET", path)["metadata"]["resourceVersion"]
        except NotThere:
            version = None
        updated = self._json("PATCH", f"{path}?fieldManager={MANAGER}", obj, APPLY)["metadata"]["resourceVersion"]
        return "created" if version is None else "unchanged" if updated == version else "configured"

    def _json(self, method: str, path: str, body: Object | None = None, content_type: str = "application/json") -> Any:
        with self._answer(method, path, body, content_type) as response:
            return json.loads(response.read())

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
        timeout_s: float | None = TIMEOUT_S,
    ) -> Generator[http.client.HTTPResponse]:
        try:
            with request(self._socket, method, path, body, content_type, timeout_s) as response:
                yield response
        except TimeoutError:
            raise
        except (http.client.HTTPException, OSError) as error:
            raise CommandError(f"the Kubernetes API went away: {str(error) or type(error).__name__}") from error


def _path(plural: str, namespace: str | None = None, name: str | None = None) -> str:
    inside = ["namespaces", namespace] if namespace else []
    return quoted(API, *inside, plural, *([name] if name else []))


def _path_of(obj: Object) -> str:
    return _path(f"{obj['kind'].lower()}s", obj["metadata"].get("namespace", "default"), obj["metadata"]["name"])


def _name(obj: Object) -> str:
    return obj["metadata"]["name"]


def _component(pod: Object) -> str:
    return pod["metadata"]["labels"].get(COMPONENT, "")


def _has_tls(pod: Object) -> bool:
    arguments = (argument for container in pod["spec"]["containers"] for argument in container.get("args", ()))
    return any(argument.startswith("--tls-dir") for argument in arguments)


def _pod_row(pod: Object) -> tuple[str, ...]:
    status, containers = pod["status"], pod["status"].get("containerStatuses", ())
    ready = next((c["status"] for c in status.get("conditions", ()) if c["type"] == "Ready"), "False")
    waiting = [container["state"]["waiting"] for container in containers if "waiting" in container.get("state", {})]
    note = next((state.get("reason", "") for state in waiting), status.get("message", ""))
    restarts = sum(container.get("restartCount", 0) for container in containers)
    phase = "Terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Unknown")
    return _component(pod), _name(pod), ready, phase, str(restarts), note

"""Level (a): a real Kubernetes control plane on this machine, ready in a few seconds.

    with ControlPlane() as control_plane:
        control_plane.apply_crds()
        control_plane.kubectl("apply", "-f", "-", stdin=manifest)

It is etcd, kube-apiserver and kube-controller-manager (garbage collection, Deployments, ReplicaSets, HPA; no node, so
pods stay Pending and tests write their status). Every tool is real; nothing is faked. Everything lies in a temporary
directory and ends with the process that started it, also when that is killed.

It is as strict as clusters may be:

- RBAC and PodSecurity are on, and so is OwnerReferencesPermissionEnforcement: who sets `blockOwnerDeletion` needs
  `update` on the owner's `finalizers`;
- every writing request is in `audit_log`, JSON lines that are complete once the request is answered;
- the HPA looks every 2 s and shrinks after 5 s; aggregated APIs get the request-header CA.

What tests do with it, or with a cluster of somebody else's, is `harness.cluster.cluster`.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from weft_devcluster import flags, tools
from weft_devcluster.access import Access, Endpoint, Users
from weft_devcluster.api import Api
from weft_devcluster.certificates import Authority, signing_key
from weft_devcluster.errors import StartFailed
from weft_devcluster.folders import owned_folder
from weft_devcluster.machine import own_address
from weft_devcluster.processes import Process, free_ports, wait_until

ADMIN = "admin"
CONTROLLERS = "system:kube-controller-manager"
LOOPBACK = "127.0.0.1"


class ControlPlane(Api):
    """A control plane, as the module says. `address` is what the API server listens on; `users` are added to the admin,
    name -> group."""

    def __init__(
        self, address: str = LOOPBACK, services: str = "10.96.0.0/16", users: Mapping[str, str] | None = None
    ) -> None:
        self.address, self.services = address, services
        self._stack = contextlib.ExitStack()
        self._extra_users = dict(users or {})

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(owned_folder("weft-cluster-"))
            self._prepare()
            stack.callback(self.objects.close)
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -------------------------------------------------------------------------------------- what its users ask of it

    def restart_api_server(self) -> None:
        """Kill it, start another one on the same address and data, and wait until it answers."""
        (old,) = (process for process in self.processes if process.name == "kube-apiserver")
        old.end()
        self.processes.remove(old)
        self._run(self._stack, "kube-apiserver", self._api_server())
        self._wait_for("/readyz")

    def logs(self) -> str:
        """Read the ends of all logs, for a failure's report."""
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in self.processes)

    # ------------------------------------------------------------------------------------------------- the start

    def _prepare(self) -> None:
        self._ports = flags.Ports(*free_ports(3, LOOPBACK))
        (self._api_port,) = free_ports(1, self.address)
        self.authority = Authority(self.folder, "ca")
        self.front_proxy = Authority(self.folder, "front-proxy-ca")
        self.endpoint = Endpoint(f"https://{self.address}:{self._api_port}", self.authority.crt)
        self._users = Users(self.folder)
        for user, group in {ADMIN: "system:masters", CONTROLLERS: "", **self._extra_users}.items():
            self._users.add(user, group)
        self.admin = self._users.access(ADMIN, self.endpoint)
        self._signing_key = signing_key(self.folder, "service-accounts.key")
        self.audit_log = self.folder / "audit.jsonl"

    def user(self, name: str) -> Access:
        """The access of one of the `users` given at the start."""
        return self._users.access(name, self.endpoint)

    def _start(self, stack: contextlib.ExitStack) -> None:
        self.processes: list[Process] = []
        self._run(stack, "etcd", flags.etcd(self.folder, self._ports))
        self._run(stack, "kube-apiserver", self._api_server())
        self._wait_for("/readyz")
        self._run(stack, "kube-controller-manager", self._controllers())  # it ends without an API server
        self.wait_until("serviceaccount", "default", "default", lambda _: True, "is there")

    def _run(self, stack: contextlib.ExitStack, name: str, options: Sequence[str]) -> None:
        process = Process(name, [tools.path(name), *options], self.folder)
        stack.callback(process.end)
        self.processes.append(process)

    def _api_server(self) -> list[str]:
        policy = self.folder / "audit-policy.json"
        policy.write_text(json.dumps(flags.AUDIT_POLICY))
        names = flags.serving_names(self.address, self.services)
        made = flags.Credentials(
            serving=self.authority.issue("kube-apiserver", "kube-apiserver", names),
            kubelet=self.authority.issue("kubelet-client", "kube-apiserver-kubelet-client", group="system:masters"),
            proxy=self.front_proxy.issue(flags.PROXY_CLIENT, flags.PROXY_CLIENT),
            client_ca=self.ca,
            proxy_ca=self.front_proxy.crt,
            tokens=self._users.file,
            signing_key=self._signing_key,
        )
        advertised = own_address() if self.address.startswith("127.") else self.address
        serve = flags.Serving(self.address, self._api_port, advertised, self.services)
        return [
            *flags.api_server(serve, self._ports, made),
            f"--audit-log-path={self.audit_log}",
            f"--audit-policy-file={policy}",
            "--audit-log-mode=blocking",
        ]

    def _controllers(self) -> list[str]:
        kubeconfig = self._users.access(CONTROLLERS, self.endpoint).kubeconfig
        return flags.controller_manager(kubeconfig, self._ports, self.ca, self._signing_key)

    def _wait_for(self, path: str) -> None:
        """Ask until it answers: before it listens there is no event to wait for. Raises StartFailed with the logs."""

        def answers() -> bool:
            for process in self.processes:
                process.check()
            return self._answers(path)

        try:
            wait_until(answers, f"the API server answers {path}")
        except StartFailed as error:
            raise StartFailed(f"{error}\n{self.logs()}") from error

    def _answers(self, path: str) -> bool:
        with self.client() as client, contextlib.suppress(HTTPError, ApiException):
            return client.call_api(*client.param_serialize("GET", path, auth_settings=["BearerToken"])).status == 200
        return False

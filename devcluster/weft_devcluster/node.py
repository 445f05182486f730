"""Level (b): one whole node on this machine, where pods really run.

    with Node() as node:
        node.control_plane.kubectl("apply", "-f", "examples/quickstart")
        urllib.request.urlopen(f"http://{cluster_ip}/")     # ClusterIPs and pod addresses are reachable from here

Beside the control plane of level (a): kube-scheduler, kubelet, containerd with runc, CNI, kube-proxy (iptables),
CoreDNS; `kubectl logs`, `exec` and `port-forward` work. Everything but the control plane and the scheduler is in a
bag (`cluster.bag`), so this machine's interfaces, tables and mounts stay as they are. It needs root, containerd, runc,
containernetworking-plugins, iptables and conntrack (`make cluster-tools` installs them where it may); what is
missing is told by ToolMissing.

There is no image registry: the one image (`PAUSE_IMAGE`, and any other name given in `images`) holds a program that
waits, and pods run Python from `python_volumes()`. Claims are bound to local volumes. Nothing is routed beyond this
machine. NetworkPolicies are enforced by `network_policies` alone: the CNI plugins here know nothing of them.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from weft_devcluster import flags, node_files, tools
from weft_devcluster.bag import Bag
from weft_devcluster.control_plane import ControlPlane
from weft_devcluster.errors import StartFailed
from weft_devcluster.folders import owned_folder
from weft_devcluster.image import PAUSE_IMAGE, write_image
from weft_devcluster.machine import check_node
from weft_devcluster.node_files import NODE_NAME
from weft_devcluster.processes import Process, free_ports, wait_until
from weft_devcluster.python_pod import PythonVolumes, python_volumes

KUBELET, PROXY, DNS, SCHEDULER = (
    f"system:node:{NODE_NAME}",
    "system:kube-proxy",
    "system:coredns",
    "system:kube-scheduler",
)
USERS = {KUBELET: "system:nodes", PROXY: "", DNS: "", SCHEDULER: ""}
VOLUMES = 32  # each is used once


class Node:
    """A node, as the module says. `images` are more names (`repository:tag`) for the one image."""

    def __init__(self, images: Sequence[str] = ()) -> None:
        self._images = (PAUSE_IMAGE, *images)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        check_node()
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(owned_folder("weft-node-"))
            self.bag = stack.enter_context(Bag(self.folder))
            network = self.bag.network
            self.control_plane = stack.enter_context(ControlPlane(network.machine, str(network.services), USERS))
            self._processes: dict[str, Process] = {}
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # --------------------------------------------------------------------------------------------- what tests use

    @property
    def kubeconfig(self) -> Path:
        return self.control_plane.kubeconfig

    def python_volumes(self) -> PythonVolumes:
        """Gather what a pod needs to run this checkout's Python."""
        return python_volumes()

    def pids(self, namespace: str, pod: str) -> list[int]:
        """List processes of a pod's containers (its sandbox left out), numbered as this machine does."""
        status = self.control_plane.get("pod", pod, namespace)["status"]
        ids = [container["containerID"].rpartition("/")[2] for container in status.get("containerStatuses", ())]
        return [pid for identity in ids for pid in self.bag.cgroup_pids(f"**/{identity}")]

    def kill(self, namespace: str, pod: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to every process of a pod's containers, as a crash would. Raises StartFailed without any."""
        found = self.pids(namespace, pod)
        if not found:
            raise StartFailed(f"pod {namespace}/{pod} has no process")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def logs(self) -> str:
        """Read the ends of all logs, for a failure's report."""
        parts = [f"--- {name}\n{process.tail()}" for name, process in self._processes.items()]
        return "\n".join([self.control_plane.logs(), *parts])

    # ------------------------------------------------------------------------------------------------- the start

    def _start(self, stack: contextlib.ExitStack) -> None:
        self._containerd(stack)
        self._scheduler(stack)
        self._dns(stack)
        self._proxy(stack)
        self._kubelet(stack)
        self._volumes()
        self._wait_until_ready()

    def _containerd(self, stack: contextlib.ExitStack) -> None:
        config = self._write("containerd.toml", node_files.containerd(self.folder))
        self._write("cni/10-weft.conflist", node_files.cni(self.folder, self.bag.network))
        self._run(stack, "containerd", "containerd", f"--config={config}")
        archive, socket = self.folder / "image.tar", self.folder / "containerd.sock"
        write_image(archive, tools.path(tools.PAUSE), self._images)
        self._until(socket.exists, "containerd")
        self.bag.run("ctr", f"--address={socket}", "--namespace=k8s.io", "images", "import", archive)

    def _kubelet(self, stack: contextlib.ExitStack) -> None:
        plane, network = self.control_plane, self.bag.network
        serving = plane.authority.issue("kubelet", KUBELET, [network.node, NODE_NAME], "system:nodes")
        content = node_files.kubelet(self.folder, network, plane.ca, serving, self.bag.cgroup)
        options = [
            f"--config={self._write('kubelet.json', content)}",
            f"--kubeconfig={plane.user(KUBELET).kubeconfig}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={network.node}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet-certificates'}",
        ]
        self._run(stack, "kubelet", tools.path("kubelet"), *options)

    def _proxy(self, stack: contextlib.ExitStack) -> None:
        options = [
            f"--kubeconfig={self.control_plane.user(PROXY).kubeconfig}",
            f"--hostname-override={NODE_NAME}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={self.bag.network.pods}",
            f"--bind-address={self.bag.network.node}",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--iptables-min-sync-period=100ms",
            "--oom-score-adj=0",
        ]
        self._run(stack, "kube-proxy", tools.path("kube-proxy"), *options)

    def _dns(self, stack: contextlib.ExitStack) -> None:
        self.control_plane.apply(*node_files.dns_rights(DNS))
        content = node_files.corefile(self.bag.network, self.control_plane.user(DNS).kubeconfig)
        self._run(stack, "coredns", tools.path("coredns"), "-conf", self._write("Corefile", content))

    def _scheduler(self, stack: contextlib.ExitStack) -> None:
        kubeconfig = self.control_plane.user(SCHEDULER).kubeconfig
        options = flags.scheduler(kubeconfig, free_ports(1, "127.0.0.1")[0])
        process = Process("kube-scheduler", [tools.path("kube-scheduler"), *options], self.folder)
        stack.callback(process.end)
        self._processes["kube-scheduler"] = process

    def _volumes(self) -> None:
        for number in range(VOLUMES):
            (self.folder / f"volume-{number}").mkdir()
        self.control_plane.apply(*node_files.storage(self.folder, VOLUMES))

    def _wait_until_ready(self) -> None:
        self._until(lambda: bool(self.control_plane.get("nodes")["items"]), "the kubelet")
        self.control_plane.wait("--for=condition=Ready", f"node/{NODE_NAME}")
        self._until(lambda: not self.control_plane.get("node", NODE_NAME)["spec"].get("taints"), "an untainted node")

    def _run(self, stack: contextlib.ExitStack, name: str, *command: str | Path) -> None:
        process = self.bag.start(name, *command)
        stack.callback(process.end)
        self._processes[name] = process

    def _write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    def _until(self, holds: Callable[[], bool], who: str) -> None:
        """Wait until it holds. Raises StartFailed with the logs."""

        def holds_or_failed() -> bool:
            for process in self._processes.values():
                process.check()
            return holds()

        try:
            wait_until(holds_or_failed, f"{who} is there")
        except StartFailed as error:
            raise StartFailed(f"{error}\n{self.logs()}") from error

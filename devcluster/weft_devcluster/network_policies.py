"""NetworkPolicies of a node, enforced: what is not allowed is dropped on its way between two pods.

    with NetworkPolicies(node.control_plane, node.bag):
        ...

The CNI plugins of a node know nothing of them, but they route every packet between pods, so iptables sees it after the
Service's address was replaced by a pod's. A thread looks at policies, pods and namespaces every LOOK_S and writes the
chains anew when they have changed: what is new is not enforced until then. Connections that were open before stay open.
The node and the machine (API server, tests) may reach every pod and be reached, as a node may. Ports are numbers.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft_devcluster.api import Api
from weft_devcluster.bag import Bag
from weft_devcluster.errors import Refused
from weft_devcluster.processes import wait_until

LOOK_S = 0.5
CHAIN = "WEFT-POLICIES"
TABLE = "mangle"  # before kube-proxy accepts anything in `filter`
Object = Mapping[str, Any]


class NetworkPolicies:
    """The enforcement of a node's policies. Once entered, the policies that are there hold."""

    def __init__(self, api: Api, bag: Bag, folder: Path) -> None:
        self._api, self._bag, self._file = api, bag, folder / "network-policies"
        self._over, self._written = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="network policies", daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._look()
        self._iptables("-I", "FORWARD", "-j", CHAIN)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._iptables("-D", "FORWARD", "-j", CHAIN)
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Wait until what is there now is enforced. Raises StartFailed, and what ended the thread."""
        wait_until(self._is_enforced, "the policies are enforced")

    def _is_enforced(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._rules() == self._written

    def _run(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                with contextlib.suppress(Refused):  # asked again
                    self._look()
        except Exception as failure:  # noqa: BLE001 (raised by `settle`, and at the end)
            self._failure = failure

    def _look(self) -> None:
        rules = self._rules()
        if rules != self._written:
            self._file.write_text(rules)
            self._bag.run("iptables-restore", "--noflush", self._file)
            self._written = rules

    def _rules(self) -> str:
        policies, pods, namespaces = (self._api.get(k)["items"] for k in ("networkpolicies", "pods", "namespaces"))
        network = self._bag.network
        return restore_input(policies, pods, namespaces, (network.machine, network.node))

    def _iptables(self, *words: str) -> None:
        self._bag.run("iptables", "--wait", f"--table={TABLE}", *words)


def restore_input(
    policies: Sequence[Object], pods: Sequence[Object], namespaces: Sequence[Object], free: Sequence[str]
) -> str:
    """Write what iptables-restore reads. `free` are addresses that no policy is about."""
    labels = {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in namespaces}
    there = sorted(filter(_has_address, pods), key=_address)
    chains, rest = [CHAIN], list[str]()
    first = ["-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"]
    first += [f"{end} {address} -j RETURN" for address in free for end in ("-s", "-d")]
    for number, pod in enumerate(there):
        for direction, own, other in (("Ingress", "-d", "-s"), ("Egress", "-s", "-d")):
            selecting = [policy for policy in policies if _selects(policy, pod, direction)]
            if not selecting:
                continue
            chain = f"{CHAIN}-{direction[:2].upper()}-{number}"
            chains.append(chain)
            first.append(f"{own} {_address(pod)} -j {chain}")
            allowed = (line for policy in selecting for line in _allowed(policy, direction, other, there, labels))
            rest += [f"-A {chain} {line}-j RETURN" for line in dict.fromkeys(allowed)]
            rest.append(f"-A {chain} -j DROP")
    lines = [f"*{TABLE}", *(f":{chain} - [0:0]" for chain in chains), *(f"-A {CHAIN} {line}" for line in first), *rest]
    return "\n".join([*lines, "COMMIT", ""])


def _allowed(
    policy: Object, direction: str, other: str, pods: Sequence[Object], labels: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield matches of packets that a policy allows, of its rules one after the other."""
    peers = "from" if direction == "Ingress" else "to"
    for rule in policy["spec"].get(direction.lower()) or ():
        addresses = [f"{other} {address}" for address in _addresses(policy, rule.get(peers) or (), pods, labels)]
        for address in addresses if rule.get(peers) else [""]:
            for port in map(_port, rule["ports"]) if rule.get("ports") else [""]:
                yield "".join(f"{part} " for part in (address, port) if part)


def _addresses(
    policy: Object, peers: Sequence[Object], pods: Sequence[Object], labels: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield the addresses of the pods that the peers select, and the networks that they name."""
    home = policy["metadata"]["namespace"]
    for peer in peers:
        if "ipBlock" in peer:
            yield from map(str, _networks(peer["ipBlock"]))
            continue
        far = peer.get("namespaceSelector")
        for pod in pods:
            namespace = pod["metadata"]["namespace"]
            near = namespace == home if far is None else matches(far, labels.get(namespace, {}))
            if near and matches(peer.get("podSelector") or {}, pod["metadata"].get("labels") or {}):
                yield _address(pod)


def _networks(block: Object) -> list[IPv4Network]:
    """Compute an ipBlock as networks without its exceptions; none for IPv6, which a node does not have."""
    if ":" in block["cidr"]:
        return []
    left = [IPv4Network(block["cidr"])]
    for gone in map(IPv4Network, block.get("except") or ()):
        cut = [[*whole.address_exclude(gone)] if gone.subnet_of(whole) else [whole] for whole in left]
        left = [part for parts in cut for part in parts]
    return left


def _port(port: Object) -> str:
    protocol = port.get("protocol", "TCP").lower()
    if "port" not in port:
        return f"-p {protocol}"
    first = int(port["port"])
    return f"-p {protocol} --dport {first}:{port.get('endPort', first)}"


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects these labels. An empty one selects everything."""
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        _fulfils(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def _fulfils(expression: Object, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case _:
            return value is None


def _selects(policy: Object, pod: Object, direction: str) -> bool:
    spec, metadata = policy["spec"], pod["metadata"]
    return (
        direction in spec.get("policyTypes", ("Ingress",))
        and policy["metadata"]["namespace"] == metadata["namespace"]
        and matches(spec.get("podSelector") or {}, metadata.get("labels") or {})
    )


def _has_address(pod: Object) -> bool:
    own = not pod["spec"].get("hostNetwork") and pod["status"].get("phase") in ("Pending", "Running")
    return own and bool(pod["status"].get("podIP"))


def _address(pod: Object) -> str:
    return pod["status"]["podIP"]

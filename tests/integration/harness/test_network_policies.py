"""What a node makes of NetworkPolicies: as they are written, who reaches whom."""

from typing import Any

from weft_devcluster.network_policies import matches, restore_input

LABELS = {"a": {"team": "red"}, "b": {}}
NAMESPACES = [{"metadata": {"name": name, "labels": labels}} for name, labels in LABELS.items()]


def pod(address: str, namespace: str = "a", **labels: str) -> dict[str, Any]:
    metadata = {"name": address, "namespace": namespace, "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": address}}


def policy(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "a"}, "spec": {"podSelector": {"matchLabels": {"app": "x"}}, **spec}}


SERVER, CLIENT, STRANGER = pod("10.0.0.1", app="x"), pod("10.0.0.2", app="y"), pod("10.0.0.3", namespace="b", app="y")
PODS = [SERVER, CLIENT, STRANGER]


def rules(spec: dict[str, Any]) -> list[str]:
    """Return the rules of the server's own chain; nobody else is selected, and has none."""
    lines = restore_input([policy(spec)], PODS, NAMESPACES, ("10.0.0.9",)).splitlines()
    assert {"-A WEFT-POLICIES -s 10.0.0.9 -j RETURN", "-A WEFT-POLICIES -d 10.0.0.9 -j RETURN"} <= set(lines)
    (chain,) = [line.split()[0][1:] for line in lines if line.startswith(":WEFT-POLICIES-")]
    assert sum(f"-j {chain}" in line for line in lines) == 1
    return [line.removeprefix(f"-A {chain} ") for line in lines if line.startswith(f"-A {chain} ")]


def test_without_a_policy_nothing_is_dropped() -> None:
    assert "DROP" not in restore_input([], PODS, NAMESPACES, ())


def test_a_policy_without_rules_drops_everything() -> None:
    assert rules({}) == ["-j DROP"]


def test_a_peer_is_of_the_policys_namespace_unless_it_names_others() -> None:
    app = {"podSelector": {"matchLabels": {"app": "y"}}}
    ports = [{"port": 7400}, {"protocol": "UDP", "port": 53, "endPort": 60}]
    assert rules({"ingress": [{"from": [app], "ports": ports}]}) == [
        "-s 10.0.0.2 -p tcp --dport 7400:7400 -j RETURN",
        "-s 10.0.0.2 -p udp --dport 53:60 -j RETURN",
        "-j DROP",
    ]
    anywhere = rules({"ingress": [{"from": [{"namespaceSelector": {}, **app}]}]})
    assert anywhere == ["-s 10.0.0.2 -j RETURN", "-s 10.0.0.3 -j RETURN", "-j DROP"]


def test_a_peer_that_nobody_is_allows_nobody_and_a_rule_without_peers_allows_all() -> None:
    assert rules({"ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "z"}}}]}]}) == ["-j DROP"]
    assert rules({"ingress": [{"ports": [{"port": 80}]}]}) == ["-p tcp --dport 80:80 -j RETURN", "-j DROP"]
    assert rules({"ingress": [{}]}) == ["-j RETURN", "-j DROP"]


def test_egress_is_by_destination_and_a_block_has_its_exceptions() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/30", "except": ["10.0.0.2/31"]}}
    assert rules({"policyTypes": ["Egress"], "egress": [{"to": [block]}]}) == ["-d 10.0.0.0/31 -j RETURN", "-j DROP"]


def test_a_selector_is_all_of_its_labels_and_expressions() -> None:
    def of(operator: str, *values: str) -> dict[str, Any]:
        return {
            "matchLabels": {"a": "1"},
            "matchExpressions": [{"key": "b", "operator": operator, "values": [*values]}],
        }

    labels = {"a": "1", "b": "2"}
    assert matches({}, {})
    assert [matches(of("In", "2"), labels), matches(of("NotIn", "2"), labels)] == [True, False]
    assert [matches(of("Exists"), labels), matches(of("DoesNotExist"), labels)] == [True, False]
    assert not matches(of("Exists"), {"b": "2"})

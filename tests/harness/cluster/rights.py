"""ServiceAccounts with exactly given rights, as manifests."""

from collections.abc import Mapping, Sequence
from typing import Any

Rules = Sequence[Mapping[str, Sequence[str]]]


def rule(group: str, resources: str, verbs: str) -> Mapping[str, Sequence[str]]:
    """A rule of a Role; resources and verbs with spaces between."""
    return {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}


def grants(namespace: str, account: str, rules: Mapping[str, Rules], cluster_rules: Rules) -> list[dict[str, Any]]:
    """Manifests: a ServiceAccount, a Role and binding in each namespace of `rules`, a ClusterRole and binding."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    made: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": namespace}}
    ]
    for where, allowed in rules.items():
        metadata = {"name": f"{namespace}-{account}", "namespace": where}
        made += _role("", metadata, allowed, subject)
    if cluster_rules:
        made += _role("Cluster", {"name": f"{namespace}-{account}"}, cluster_rules, subject)
    return made


def _role(scope: str, metadata: dict[str, str], rules: Rules, subject: dict[str, str]) -> list[dict[str, Any]]:
    group = "rbac.authorization.k8s.io"
    reference = {"apiGroup": group, "kind": f"{scope}Role", "name": metadata["name"]}
    return [
        {"apiVersion": f"{group}/v1", "kind": f"{scope}Role", "metadata": metadata, "rules": list(rules)},
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{scope}RoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [subject],
        },
    ]

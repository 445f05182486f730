"""The table of who may call what. A certificate's DNS name `ROLE.weft.internal` says its holder's role.

The table is the whole rule: what is not in it is refused. A runner's certificate also says whose pools it may speak
for, by `NAMESPACE.runner.weft.internal`: the owner of a pool chooses what runs there, and must not get what is sent to
the pools of others.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Role = Literal["gateway", "scheduler", "predictor", "supervisor", "depot", "operator", "runner", "batch", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
DOMAIN = ".weft.internal"

ANYONE = frozenset(ROLES)
CALLERS: Mapping[str, frozenset[Role]] = {
    "/weft.v1.Scheduler/Gateway": frozenset({"gateway"}),
    "/weft.v1.Scheduler/Cluster": frozenset({"supervisor"}),
    "/weft.v1.Scheduler/Registry": frozenset({"operator"}),
    "/weft.v1.Supervisor/Runner": frozenset({"runner"}),
    "/weft.v1.Admin/CreateKey": frozenset({"admin"}),
    "/weft.v1.Admin/RevokeKey": frozenset({"admin"}),
    "/weft.v1.Admin/ListKeys": frozenset({"admin"}),
    "/weft.v1.Admin/ListRunners": frozenset({"admin"}),
    "/weft.v1.Admin/SetLimit": frozenset({"admin"}),
    "/weft.v1.Admin/ListLimits": frozenset({"admin"}),
    "/weft.v1.Admin/GetUsage": frozenset({"admin"}),
    "/weft.v1.Admin/DeclareKey": frozenset({"operator"}),
    "/weft.v1.Admin/WithdrawKey": frozenset({"operator"}),
    "/weft.v1.Admin/ListDeclaredKeys": frozenset({"operator"}),
    "/weft.v1.Runner/Session": frozenset({"gateway"}),
    "/weft.v1.Predictor/Predictions": frozenset({"gateway"}),
    "/weft.v1.Predictor/Predict": frozenset({"gateway"}),
    "/weft.v1.Predictor/Observe": frozenset({"supervisor"}),
    **dict.fromkeys(
        (
            f"/weft.v1.Batch/{method}"
            for method in (
                "UploadFile",
                "GetFile",
                "ListFiles",
                "DeleteFile",
                "ReadFile",
                "CreateBatch",
                "GetBatch",
                "ListBatches",
                "CancelBatch",
                "KeepResponse",
                "GetConversation",
                "DeleteResponse",
                "Lines",
            )
        ),
        frozenset({"gateway"}),
    ),
    "/grpc.health.v1.Health/Check": ANYONE,
    "/grpc.health.v1.Health/Watch": ANYONE,
}
DEPOT_CALLERS: Mapping[str, frozenset[Role]] = {
    "/v1/resolve": frozenset({"operator"}),
    "/v1/operations": frozenset({"operator"}),
    "/v1/retain": frozenset({"operator"}),
    "/v1/changed": frozenset({"operator"}),
    "/v1/uploads": frozenset({"gateway"}),
    "/v1/blobs": frozenset({"runner", "gateway", "operator"}),
}
KV_CALLERS: frozenset[Role] = frozenset({"runner"})  # of weft/wire/v1/kv_transfer.proto, and only within a pool


def dns_name(role: Role, namespace: str = "") -> str:
    """The DNS name that a certificate of this role carries. `namespace`: of a runner's pool."""
    return f"{namespace}.{role}{DOMAIN}" if namespace else role + DOMAIN


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """The roles among a certificate's DNS names; other names say nothing."""
    roles_named = frozenset(names)
    return frozenset(role for role in ROLES if dns_name(role) in roles_named)


def pool_namespaces_of(names: Iterable[str]) -> frozenset[str]:
    """The namespaces whose pools a runner with these DNS names may belong to; none: its certificate does not say."""
    suffix = f".{dns_name('runner')}"
    return frozenset(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def refusal(roles: frozenset[Role], allowed: frozenset[Role], subject: str) -> str | None:
    """Explain why a peer with these roles may not do `subject`; None: it may."""
    if roles & allowed:
        return None
    is_a = " and ".join(sorted(roles)) or f"no role (it has no DNS name ROLE{DOMAIN})"
    needed = " or ".join(sorted(allowed)) or "nobody's"
    return f"the caller's certificate is of {is_a}; {subject} needs {needed}"

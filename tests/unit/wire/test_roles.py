"""Who may call what: the table is complete, and is the one that the plan of the processes names."""

import pytest

from weft.wire.roles import CALLERS, DEPOT_CALLERS, ROLES, dns_name, pool_namespaces_of, refusal, roles_of
from weft.wire.v1 import batch_pb2, predictor_pb2, runner_pb2, scheduler_pb2, supervisor_pb2


def test_every_call_of_the_contracts_is_in_the_table_and_nothing_else() -> None:
    files = (m.DESCRIPTOR for m in (batch_pb2, predictor_pb2, runner_pb2, scheduler_pb2, supervisor_pb2))
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert {name for name in CALLERS if name.startswith("/weft.")} == methods


def test_only_a_name_of_weft_makes_a_role() -> None:
    assert roles_of(["gateway.weft.internal", "gateway.default.svc", "runner", "x.runner.weft.internal"]) == {"gateway"}
    assert roles_of(iter(dns_name(role) for role in ROLES)) == set(ROLES)
    assert roles_of([]) == set()


def test_a_runners_certificate_says_whose_pools_it_may_speak_for() -> None:
    assert pool_namespaces_of(["runner.weft.internal", "a.runner.weft.internal", "b.gateway.weft.internal"]) == {"a"}
    assert pool_namespaces_of(["runner.weft.internal"]) == set()


@pytest.mark.parametrize("what", [*CALLERS, *DEPOT_CALLERS])
def test_a_refusal_says_who_asks_and_who_may(what: str) -> None:
    allowed = {**CALLERS, **DEPOT_CALLERS}[what]
    for role in ROLES:
        said = refusal(frozenset([role]), allowed, what)
        assert (said is None) == (role in allowed)
        if said:
            assert f"is of {role}; {what} needs {' or '.join(sorted(allowed))}" in said


def test_a_certificate_without_a_role_is_told_what_it_lacks() -> None:
    assert "no role (it has no DNS name ROLE.weft.internal)" in str(refusal(frozenset(), frozenset({"admin"}), "/x"))

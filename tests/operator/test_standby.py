"""Two processes of which one acts, by a Lease of a real API server, with the rights that the chart gives them.

A client knows both addresses, as it does by the chart's Service without an address of its own.
"""

import contextlib
import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness import chart
from harness.cluster.cluster import Cluster
from harness.operator.stage import Replica
from harness.ports import free_addresses
from harness.waiting import wait_until
from weft.wire.channels import options_to

SERVING = health_pb2.HealthCheckResponse.SERVING


class Pair:
    """Two processes of a component, and whoever asks them."""

    def __init__(self, plane: Cluster, namespace: str, folder: Path, component: str) -> None:
        self._plane, self._namespace, self._folder, self._component = plane, namespace, folder, component
        values = f"{component}.replicas=2" + (",depot.persistence.existingClaim=c" if component == "depot" else "")
        only = ("--set", values, "--show-only", "templates/rbac.yaml")
        found = chart.objects(chart.render("default", *chart.QUICK, *only, namespace=namespace))
        role = chart.one(found, "Role", f"weft-{component}-lease")
        self.access = plane.service_account(namespace, component, role["rules"])
        self._addresses = free_addresses(2)
        self.processes = [self.start(0), self.start(1)]

    def start(self, number: int) -> Replica:
        (probes,) = free_addresses(1)
        flags = {**self.flags(number), "probes": probes, "lease": f"{self._namespace}/weft-{self._component}"}
        made = Replica(
            f"{self._component}-{number}",
            f"weft_{self._component}",
            flags,
            self._folder,
            kubeconfig=self.access.kubeconfig,
        )
        made.probes = probes
        wait_until(lambda: "standing by" in made.said() and made.get("/healthz")[0] == 200, "it stands by")
        return made

    def flags(self, number: int) -> dict[str, object]:
        """Return the flags of one of the two."""
        return {"listen": self._addresses[number], "data-dir": self._folder / str(number)}

    def serves(self) -> bool:
        """True where one of the two answers whoever tries both addresses."""
        with grpc.insecure_channel(f"ipv4:{','.join(self._addresses)}", options=options_to("scheduler")) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
            return answer.status == SERVING

    def until_served(self) -> None:
        """Wait until one serves."""
        wait_until(self.serves, "one of them serves")

    def acting(self) -> tuple[Replica, Replica]:
        """Return the one that acts, and the other."""
        first, second = self.processes
        self.until_served()
        return (first, second) if "leading" in first.said() else (second, first)

    @property
    def term(self) -> int:
        return self._lease["leaseTransitions"]

    @property
    def holder(self) -> str:
        return self._lease.get("holderIdentity") or ""

    @property
    def _lease(self) -> dict[str, Any]:
        return self._plane.get("lease", f"weft-{self._component}", self._namespace)["spec"]


class Depots(Pair):
    """Two depots of one data directory."""

    def flags(self, number: int) -> dict[str, object]:
        """Return the flags of one of the two depots."""
        quickstart = Path(__file__).parents[2] / "examples" / "quickstart"
        return {"http": self._addresses[number], "data-dir": self._folder / "shared", "file-root": quickstart}

    def serves(self) -> bool:
        """True where one of the two answers whoever tries both addresses."""
        return self.ask("POST", "/v1/changed", json={"watches": []}) is not None

    def ask(self, method: str, path: str, **how: Any) -> httpx2.Response | None:
        """Ask both; return the answer of the one that listens; None: none does, or it does not answer."""
        for address in self._addresses:
            with contextlib.suppress(httpx2.TransportError):
                return httpx2.request(method, f"http://{address}{path}", timeout=5.0, trust_env=False, **how)
        return None

    def resolve(self) -> str:
        """Return the digest of the quickstart's model, from the one that acts; the other may hold what it is asked."""
        request = {"kind": "model", "uri": "file:model", "namespace": "default"}
        digests = list[str]()

        def is_resolved() -> bool:
            answer = self.ask("POST", "/v1/resolve", params={"wait_s": 1}, json=request)
            if answer is not None and (digest := answer.json().get("digest")):
                digests.append(digest)
            return bool(digests)

        wait_until(is_resolved, "one of them has resolved the model")
        return digests[0]


@pytest.fixture
def pair(control_plane: Cluster, namespace: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    component = getattr(request, "param", "scheduler")
    made = (Depots if component == "depot" else Pair)(control_plane, namespace, tmp_path, component)
    yield made
    for process in made.processes:
        process.signal(signal.SIGCONT)
        process.stop()
        print(f"----- {process.name}\n{process.said()}")


@pytest.mark.parametrize("pair", ["scheduler", "predictor", "depot"], indirect=True)
def test_after_kill_9_the_standby_acts_under_a_higher_term(pair: Pair) -> None:
    active, standby = pair.acting()
    for process in (active, standby):
        assert process.get("/readyz") == (200, "ok\n"), "replacing one must not wait for peers that the other has"
    assert f"term={pair.term}" in active.said()
    first = pair.term
    active.signal(signal.SIGKILL)
    active.ended()
    pair.until_served()
    assert pair.term == first + 1
    assert f"term={pair.term}" in standby.said()


@pytest.mark.parametrize("pair", ["depot"], indirect=True)
def test_what_one_depot_has_fetched_the_other_serves(pair: Depots) -> None:
    active, standby = pair.acting()
    digest = pair.resolve()
    active.pause()
    pair.until_served()
    blob = pair.ask("GET", f"/v1/blobs/{digest}")
    assert blob is not None
    assert f"sha256:{hashlib.sha256(blob.content).hexdigest()}" == digest
    assert pair.resolve() == digest
    active.signal(signal.SIGCONT)
    assert active.ended() == 1
    assert standby.running


@pytest.mark.parametrize("pair", ["scheduler", "depot"], indirect=True)
def test_one_that_stood_still_meanwhile_ends_when_it_wakes_and_the_standby_acts_on(pair: Pair) -> None:
    active, standby = pair.acting()
    active.pause()
    pair.until_served()
    term = pair.term
    active.signal(signal.SIGCONT)
    assert active.ended() == 1
    assert "the turn is over" in active.said()
    assert standby.running
    assert pair.serves()
    assert pair.term == term


@pytest.mark.parametrize("pair", ["scheduler", "depot"], indirect=True)
def test_sigterm_hands_over_at_once_and_one_that_starts_again_in_its_place_stands_by(pair: Pair) -> None:
    active, standby = pair.acting()
    holder = pair.holder
    active.signal(signal.SIGTERM)
    assert active.ended() == 0
    assert pair.holder != holder, "it was given back"
    pair.until_served()
    number = pair.processes.index(active)
    pair.processes[number] = again = pair.start(number)
    again.signal(signal.SIGTERM)
    assert again.ended() == 0, "who stands by ends at once"
    assert standby.running


def test_one_that_is_killed_and_starts_again_in_its_data_directory_acts_at_once(pair: Pair) -> None:
    active, standby = pair.acting()
    first = pair.term
    active.signal(signal.SIGKILL)
    active.ended()
    number = pair.processes.index(active)
    pair.processes[number] = pair.start(number)
    pair.until_served()
    assert pair.term == first + 1
    assert "leading" not in standby.said()

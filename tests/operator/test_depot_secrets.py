"""Secrets and ConfigMaps of a real API server, with exactly the rights that the depot's service account is given."""

import logging
import re
from collections.abc import Iterator

import pytest
from kubernetes import client

from harness.cluster.cluster import Cluster
from harness.waiting import wait_until
from weft.artifacts.errors import ArtifactError, Reason
from weft_depot.credentials import KubernetesConfigMaps, KubernetesSecrets, Secret


class Depot:
    """A service account without any rights, and two namespaces of tenants with a Secret each."""

    def __init__(self, plane: Cluster, admin: client.CoreV1Api) -> None:
        self.plane = plane
        self.home, self.team, self.other = map(plane.create_namespace, ("weft", "team", "other"))
        for namespace in (self.team, self.other):
            secret = client.V1Secret(metadata={"name": "hub"}, string_data={"token": f"hf_{namespace}"})
            admin.create_namespaced_secret(namespace, secret)
        self.api = plane.client(plane.service_account(self.home, "depot"))
        self.secrets = KubernetesSecrets(client.CoreV1Api(self.api))

    def kubectl(self, *arguments: str) -> str:
        return self.plane.kubectl(*arguments)

    def refusal(self, namespace: str, name: str) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            self.secrets.read(namespace, name)
        return caught.value

    def grant_as_told(self, namespace: str, name: str) -> None:
        """Run the commands of the refusal as they stand there, and wait until they count at the API server."""
        commands = re.findall(r"kubectl (create [^&]+)", self.refusal(namespace, name).message)
        assert len(commands) == 2
        for command in commands:
            self.kubectl(*command.split())
        wait_until(lambda: not self._forbidden(namespace, name), "the grant counts")

    def _forbidden(self, namespace: str, name: str) -> bool:
        try:
            self.secrets.read(namespace, name)
        except ArtifactError as error:
            return error.reason == Reason.SECRET_FORBIDDEN
        return False


@pytest.fixture(scope="module")
def admin(control_plane: Cluster) -> Iterator[client.CoreV1Api]:
    with control_plane.client() as api:
        yield client.CoreV1Api(api)


@pytest.fixture
def depot(control_plane: Cluster, admin: client.CoreV1Api) -> Iterator[Depot]:
    made = Depot(control_plane, admin)
    yield made
    made.api.close()
    for namespace in (made.home, made.team, made.other):
        control_plane.delete_namespace(namespace)


def test_without_rights_it_says_what_grants_them_and_that_works(depot: Depot) -> None:
    error = depot.refusal(depot.team, "hub")
    assert error.reason == Reason.SECRET_FORBIDDEN
    assert f"--serviceaccount={depot.home}:depot" in error.message
    depot.grant_as_told(depot.team, "hub")
    assert depot.secrets.read(depot.team, "hub").text("token") == f"hf_{depot.team}"


def test_the_grant_is_for_that_one_secret(depot: Depot) -> None:
    depot.grant_as_told(depot.team, "hub")
    depot.kubectl("create", "secret", "generic", "another", "-n", depot.team, "--from-literal=token=x")
    for namespace, name in ((depot.team, "another"), (depot.other, "hub")):
        assert depot.refusal(namespace, name).reason == Reason.SECRET_FORBIDDEN


def test_a_secret_that_is_not_there_is_missing_where_it_may_be_read(depot: Depot) -> None:
    depot.grant_as_told(depot.team, "later")
    error = depot.refusal(depot.team, "later")
    assert error.reason == Reason.SECRET_MISSING
    assert f"{depot.team}/later" in error.message


def test_binary_values_come_as_they_are(depot: Depot) -> None:
    depot.grant_as_told(depot.team, "hub")
    patch = '{"data": {"token": "/wA=", "more": ""}}'
    depot.kubectl("patch", "secret", "hub", "-n", depot.team, "-p", patch)
    assert depot.secrets.read(depot.team, "hub") == Secret(f"{depot.team}/hub", {"token": b"\xff\x00", "more": b""})


@pytest.mark.parametrize(("namespace", "name"), [("..", "hub"), ("team", "../../kube-system/x"), ("team", "a?b=c")])
def test_no_name_becomes_another_request(depot: Depot, namespace: str, name: str) -> None:
    assert depot.refusal(namespace, name).reason == Reason.SECRET_INVALID


def test_an_entry_of_a_config_map_is_read_with_a_right_to_get_that_one(depot: Depot, admin: client.CoreV1Api) -> None:
    maps = KubernetesConfigMaps(client.CoreV1Api(depot.api))

    def reason(namespace: str, name: str) -> Reason | None:
        try:
            assert maps.read(namespace, name) == "{{ messages }}"
        except ArtifactError as error:
            told.append(error.message)
            return error.reason
        return None

    told: list[str] = []
    for name in ("chat", "other"):
        found = {"chat_template.jinja": "{{ messages }}"}
        admin.create_namespaced_config_map(depot.team, client.V1ConfigMap(metadata={"name": name}, data=found))
    assert reason(depot.team, "chat") == Reason.CONFIG_MAP_FORBIDDEN
    for command in re.findall(r"kubectl (create [^&]+)", told[0]):
        depot.kubectl(*command.split())
    wait_until(lambda: reason(depot.team, "chat") is None, "the grant counts")
    assert reason(depot.team, "other") == reason(depot.other, "chat") == Reason.CONFIG_MAP_FORBIDDEN
    for entries in ({"chat_template.jinja": ""}, {"template": "{{ messages }}"}):
        admin.replace_namespaced_config_map(
            "chat", depot.team, client.V1ConfigMap(metadata={"name": "chat"}, data=entries)
        )
        assert reason(depot.team, "chat") == Reason.CONFIG_MAP_MISSING
    admin.delete_namespaced_config_map("chat", depot.team)
    assert reason(depot.team, "chat") == reason("..", "chat") == reason("a", "b?c") == Reason.CONFIG_MAP_MISSING


def test_an_api_server_that_does_not_answer_is_tried_later() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = 1
    api = client.CoreV1Api(client.ApiClient(configuration))
    for read in (KubernetesSecrets(api).read, KubernetesConfigMaps(api).read):
        with pytest.raises(ArtifactError) as caught:
            read("team", "hub")
        assert caught.value.reason == Reason.SOURCE_UNREACHABLE


def test_a_token_that_is_not_known_is_tried_later(depot: Depot) -> None:
    stranger = depot.plane.client(depot.plane.service_account(depot.home, "gone"))
    stranger.configuration.api_key = {"authorization": "Bearer nobody"}
    try:
        with pytest.raises(ArtifactError) as caught:
            KubernetesSecrets(client.CoreV1Api(stranger)).read(depot.team, "hub")
    finally:
        stranger.close()
    assert caught.value.reason == Reason.SOURCE_UNREACHABLE
    assert "401" in caught.value.message


def test_the_client_logs_no_answer(depot: Depot, admin: client.CoreV1Api, caplog: pytest.LogCaptureFixture) -> None:
    depot.grant_as_told(depot.team, "hub")
    caplog.set_level(logging.DEBUG)
    depot.secrets.read(depot.team, "hub")
    assert f"hf_{depot.team}" not in caplog.text
    told = caplog.text
    assert admin.read_namespaced_secret("hub", depot.team).data["token"] not in told

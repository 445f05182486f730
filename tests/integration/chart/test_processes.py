"""What the chart tells processes is what they take: flags, ports, defaults, certificates, peers."""

import base64
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from harness import chart
from harness.chart import COMPONENTS, OPEN_SETS, PLAIN_SETS, VALUE_SETS, Json, arguments_of, one, pod_templates
from weft.settings import ProcessSettings
from weft.wire.roles import CALLERS, DEPOT_CALLERS, ROLES, Role, dns_name, pool_namespaces_of
from weft.wire.tls import FILES, Tls
from weft_batch.settings import BatchSettings
from weft_depot.settings import DepotSettings
from weft_gateway.settings import GatewaySettings
from weft_operator.core import (
    CONTAINER_SECURITY,
    GRPC_PORT,
    KV_PORT,
    POD_SECURITY,
    PROBES_PORT,
    RunnerDefaults,
    SharedFolders,
)
from weft_operator.kubernetes import Settings as OperatorSettings
from weft_operator.kubernetes import parse_runner_defaults
from weft_predictor.settings import PredictorSettings
from weft_scheduler.settings import SchedulerSettings
from weft_supervisor.settings import SupervisorSettings

Rendered = dict[str, list[Json]]

SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "operator": OperatorSettings,
    "scheduler": SchedulerSettings,
    "supervisor": SupervisorSettings,
    "predictor": PredictorSettings,
    "depot": DepotSettings,
    "batch": BatchSettings,
}


def settings_of(found: list[Json], component: str, root: Path) -> ProcessSettings:
    """A component's settings from its arguments; folders that are checked to be there lie below `root`."""
    moved = [
        f"{flag}={root}" if flag in ("--file-root", "--pvc-root") else argument
        for argument in arguments_of(found, component)
        for flag in [argument.partition("=")[0]]
    ]
    return SETTINGS[component].parse(moved)


@pytest.mark.parametrize("name", VALUE_SETS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_every_process_takes_its_arguments(rendered: Rendered, name: str, component: str, tmp_path: Path) -> None:
    settings = settings_of(rendered[name], component, tmp_path)
    assert settings.log_format == "json"
    assert (settings.tls_dir is None) == (name in PLAIN_SETS)


def test_settings_become_flags(rendered: Rendered, tmp_path: Path) -> None:
    settings = settings_of(rendered["postgres"], "gateway", tmp_path)
    assert isinstance(settings, GatewaySettings)
    assert (settings.hold_seconds, settings.max_in_flight, settings.max_body_bytes) == (60, 4000, 8 << 20)
    assert settings.store_responses
    assert settings.keep_alive_seconds == 650
    minimal = settings_of(rendered["minimal"], "gateway", tmp_path)
    assert isinstance(minimal, GatewaySettings)
    assert not minimal.store_responses
    assert settings.cors_origins == ["https://app.example.com", "http://localhost:3000"]


def test_folders_of_pools_are_told_to_the_operator(rendered: Rendered, tmp_path: Path) -> None:
    told = [settings_of(rendered[name], "operator", tmp_path) for name in ("default", "gpu-pools")]
    assert [settings.shared_folders for settings in told if isinstance(settings, OperatorSettings)] == [
        SharedFolders(),
        SharedFolders(frozenset({"/srv/weft", "/mnt/nvme"}), frozenset({"serving-a/cache"})),
    ]


def test_every_process_is_a_module(rendered: Rendered) -> None:
    for component, template in pod_templates(rendered["default"]):
        command = template["spec"]["containers"][0]["command"]
        if command[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(f"{command[2]}.__main__"), component


def site_of(found: list[Json]) -> RunnerDefaults:
    content = one(found, "ConfigMap", "weft-runner-defaults")["data"]["runner-defaults.yaml"]
    return parse_runner_defaults(yaml.safe_load(content), "the chart's")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_site_is_one_that_the_operator_reads(rendered: Rendered, name: str) -> None:
    defaults = site_of(rendered[name])
    assert defaults.supervisor == "weft-supervisor.weft-system.svc:7400"
    assert defaults.depot.startswith("http://" if name in PLAIN_SETS else "https://")
    assert defaults.tls_secret == ("" if name in PLAIN_SETS else "weft-runner-tls")
    pod = {field: value for field, value in defaults.security_contexts.pod.items() if field != "fsGroupChangePolicy"}
    assert (pod, defaults.security_contexts.container) == (POD_SECURITY, CONTAINER_SECURITY)


def test_the_site_says_what_values_say(rendered: Rendered) -> None:
    dev = site_of(rendered["dev"])
    assert dev.image == "weft-runner:dev"
    assert [item["name"] for item in dev.env] == ["PATH", "OMP_NUM_THREADS"]
    assert dev.volumes[0]["hostPath"] == {"path": "/opt/weft/venv"}
    assert list(dev.command) == ["/opt/weft/venv/bin/python", "-m", "weft_runner"]
    assert list(site_of(rendered["cert-manager"]).image_pull_secrets) == ["registry"]


# ---------------------------------------------------------------------------------------------------- certificates


@pytest.mark.parametrize("role", ROLES)
def test_self_signed_certificates_work_for_their_role(rendered: Rendered, role: Role, tmp_path: Path) -> None:
    certificate = unpack(one(rendered["default"], "Secret", f"weft-{role}-tls"), tmp_path)
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey), "cert-manager makes such keys, too"
    Tls(tmp_path, role)  # both ends of a handshake in memory
    dns = dns_of(certificate)
    assert dns[0] == dns_name(role)
    if role not in ("runner", "admin"):
        assert f"weft-{role}.weft-system.svc" in dns
    assert {other for other in ROLES if dns_name(other) in dns} == {role}
    assert pool_namespaces_of(dns) == ({"weft-system"} if role == "runner" else set())
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} <= set(uses)


def test_the_processes_do_not_believe_in_the_webhooks_ca(rendered: Rendered) -> None:
    found = rendered["default"]
    webhook, peers = (one(found, "Secret", name)["data"]["ca.crt"] for name in ("weft-webhook-tls", "weft-gateway-tls"))
    assert webhook != peers
    configuration = one(found, "ValidatingWebhookConfiguration", "weft-weft-system")
    assert {hook["clientConfig"]["caBundle"] for hook in configuration["webhooks"]} == {webhook}


def test_the_webhooks_certificate_is_for_the_service_that_is_called(rendered: Rendered, tmp_path: Path) -> None:
    dns = dns_of(unpack(one(rendered["default"], "Secret", "weft-webhook-tls"), tmp_path))
    hooks = one(rendered["default"], "ValidatingWebhookConfiguration", "weft-weft-system")["webhooks"]
    service = hooks[0]["clientConfig"]["service"]
    assert f"{service['name']}.{service['namespace']}.svc" in dns


def test_runners_of_every_pool_namespace_have_a_certificate_and_the_cas_key_stays_home(rendered: Rendered) -> None:
    secrets = [obj["metadata"] for obj in rendered["gpu-pools"] if obj["kind"] == "Secret"]
    away = {(meta["namespace"], meta["name"]) for meta in secrets if meta["namespace"] != chart.NAMESPACE}
    assert away == {("serving-a", "weft-runner-tls"), ("serving-b", "weft-runner-tls")}


def test_runners_of_one_pool_namespace_have_no_certificate_for_another(rendered: Rendered, tmp_path: Path) -> None:
    """Who owns a pool chooses its image: what runs there must not be sent what is for the pools of others."""
    for obj in rendered["gpu-pools"]:
        if obj["kind"] == "Secret" and obj["metadata"]["name"] == "weft-runner-tls":
            assert pool_namespaces_of(dns_of(unpack(obj, tmp_path))) == {obj["metadata"]["namespace"]}


def test_cert_manager_makes_the_same_certificates_as_helm(rendered: Rendered) -> None:
    made = {obj["spec"]["secretName"]: obj["spec"] for obj in rendered["cert-manager"] if obj["kind"] == "Certificate"}
    secrets = {obj["metadata"]["name"]: obj for obj in rendered["default"] if obj["kind"] == "Secret"}
    leaves = {name for name in secrets if name.endswith("-tls")}
    assert set(made) == leaves | {"weft-ca"}
    for name in leaves:
        assert ",".join(made[name]["dnsNames"]) == secrets[name]["metadata"]["annotations"]["serving.weft.dev/names"]
    assert [obj for obj in rendered["cert-manager"] if obj["kind"] == "Secret"] == []
    webhook = one(rendered["cert-manager"], "ValidatingWebhookConfiguration", "weft-weft-system")
    assert [*webhook["metadata"]["annotations"].values()] == ["weft-system/weft-webhook-tls"]


def unpack(secret: Json, folder: Path) -> x509.Certificate:
    """A Secret's files into a folder, as a volume shows them."""
    for name in FILES:
        (folder / name).write_bytes(base64.b64decode(secret["data"][name]))
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())


def dns_of(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


# -------------------------------------------------------------------------------------------------- who reaches whom

# Who connects to whom, from the table of who may call what. Admin is called by people, in the
# supervisor's pod, and by the operator.
SERVERS = {name: name.lower() for name in ("Scheduler", "Supervisor", "Predictor", "Runner", "Batch")}
SERVERS["Admin"] = "supervisor"


def connections() -> set[tuple[str, str]]:
    """(client, server) of every call that a process of the installation makes."""
    grpc = {
        (caller, SERVERS[method.split("/")[1].rpartition(".")[2]])
        for method, callers in CALLERS.items()
        if method.startswith("/weft.v1.")
        for caller in callers - {"admin"}
    }
    return grpc | {(caller, "depot") for callers in DEPOT_CALLERS.values() for caller in callers}


def component_of(peer: Json) -> str:
    return peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]


def allowed(policies: list[Json], direction: str, port: int) -> set[tuple[str, str]]:
    """(client, server) that policies let through on a port, as told on the side of `direction`."""
    side, peers = ("ingress", "from") if direction == "ingress" else ("egress", "to")
    pairs: set[tuple[str, str]] = set()
    for policy in policies:
        own = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in policy["spec"].get(side) or ():
            if {"port": port} in rule.get("ports", ()):
                others = [component_of(peer) for peer in rule[peers]]
                pairs |= {(other, own) if side == "ingress" else (own, other) for other in others}
    return pairs


@pytest.mark.parametrize("name", [name for name in VALUE_SETS if name not in OPEN_SETS])
def test_policies_let_through_exactly_the_connections_that_processes_make(rendered: Rendered, name: str) -> None:
    policies = [obj for obj in rendered[name] if obj["kind"] == "NetworkPolicy"]
    assert all(set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"} for policy in policies)
    assert allowed(policies, "ingress", GRPC_PORT) == connections()
    assert allowed(policies, "egress", GRPC_PORT) == connections()


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_pod_of_the_installation_is_under_one_policy(rendered: Rendered, name: str) -> None:
    policies = [obj["spec"]["podSelector"]["matchLabels"] for obj in rendered[name] if obj["kind"] == "NetworkPolicy"]
    for pod, template in pod_templates(rendered[name]):
        labels = template["metadata"]["labels"]
        matching = [policy for policy in policies if policy.items() <= labels.items()]
        assert len(matching) == (0 if name in OPEN_SETS or pod == "weft-test" else 1), pod


def test_only_the_depot_gets_out_and_runners_reach_three_peers_and_each_other(rendered: Rendered) -> None:
    policies = [obj for obj in rendered["default"] if obj["kind"] == "NetworkPolicy"]

    def far(policy: Json) -> bool:
        return any("ipBlock" in peer for rule in policy["spec"].get("egress") or () for peer in rule.get("to", ()))

    assert [policy["metadata"]["name"] for policy in policies if far(policy)] == ["weft-depot"]
    runner = one(rendered["default"], "NetworkPolicy", "weft-runner")["spec"]
    dns, kv, control = runner["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert {port["port"] for port in kv["ports"]} == {KV_PORT}
    assert {component_of(peer) for peer in control["to"]} == {"supervisor", "depot"}
    assert [{component_of(peer) for peer in rule["from"]} for rule in runner["ingress"]] == [{"gateway"}, {"runner"}]
    within = [peer for rule in (kv, runner["ingress"][1]) for peer in rule.get("to", rule.get("from"))]
    assert all("namespaceSelector" not in peer for peer in within), "KV stays within a namespace"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_addresses_lead_to_services_whose_pods_listen_there(rendered: Rendered, name: str) -> None:
    found = rendered[name]
    services = {obj["metadata"]["name"]: obj["spec"] for obj in found if obj["kind"] == "Service"}
    templates = dict(pod_templates(found))
    arguments = " ".join(argument for component in COMPONENTS for argument in arguments_of(found, component))
    addresses = set(re.findall(r"([a-z-]+)\.weft-system\.svc:(\d+)", arguments))
    asked = {name for name, _ in addresses}
    servers = {f"weft-{component}" for component in ("scheduler", "predictor", "depot", "batch", "supervisor")}
    assert {name.removesuffix("-pods") for name in asked} == servers
    assert {port for _, port in addresses} == {str(GRPC_PORT)}
    for service in {*asked, "weft-supervisor"}:
        ports, target = services[service]["ports"], service.removesuffix("-pods")
        container = templates[target]["spec"]["containers"][0]
        listening = {item["name"]: item["containerPort"] for item in container["ports"]}
        assert all(port["port"] == listening[port["targetPort"]] for port in ports), target
        # KEDA reads the scheduler's metrics.
        assert [port["port"] for port in ports] == [GRPC_PORT, *[PROBES_PORT] * (service == "weft-scheduler")], target
        assert services[service]["selector"].items() <= templates[target]["metadata"]["labels"].items()


@pytest.mark.parametrize("component", COMPONENTS)
def test_probes_ask_where_the_process_answers(rendered: Rendered, component: str, tmp_path: Path) -> None:
    settings = settings_of(rendered["default"], component, tmp_path)
    container = dict(pod_templates(rendered["default"]))[f"weft-{component}"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    address = getattr(settings, "probes", None) or settings.http  # pyright: ignore[reportAttributeAccessIssue] (the gateway's)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ports[container[probe]["httpGet"]["port"]] == int(address.rpartition(":")[2]), probe
    assert component == "gateway" or ports["probes"] == PROBES_PORT


def test_a_gateway_has_time_to_finish_its_streams(rendered: Rendered, tmp_path: Path) -> None:
    for name in VALUE_SETS:
        settings = settings_of(rendered[name], "gateway", tmp_path)
        assert isinstance(settings, GatewaySettings)
        spec = dict(pod_templates(rendered[name]))["weft-gateway"]["spec"]
        before = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] >= before + settings.drain_seconds + 10


def test_who_may_ask_the_webhook_can_be_narrowed_to_the_api_server(rendered: Rendered) -> None:
    peer = '[{"ipBlock":{"cidr":"10.0.0.1/32"}}]'
    narrowed = ("--set", "tls.mode=certManager", "--set-json", f"networkPolicy.apiServer.from={peer}")
    for found, expected in (
        (rendered["default"], None),
        (chart.objects(chart.render("default", *narrowed)), json.loads(peer)),
    ):
        (rule,) = one(found, "NetworkPolicy", "weft-operator")["spec"]["ingress"]
        assert rule["ports"] == [{"port": 9443}]
        assert rule.get("from") == expected

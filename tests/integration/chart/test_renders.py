"""What Helm makes of the chart, for each of its sets of values."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from harness import chart
from harness.chart import (
    CHART,
    COMPONENTS,
    HTTP_ROUTE,
    QUICK,
    VALUE_SETS,
    Json,
    helm,
    objects,
    one,
    pod_templates,
    render,
)
from weft.api.apikey import APIKey
from weft.api.loraadapter import LoRAAdapter
from weft.api.manifests import parse_object
from weft.api.servingpool import ServingPool
from weft.hosts import AllowedHosts, host_name
from weft_devcluster.api import definitions

Rendered = dict[str, list[Json]]


@pytest.mark.parametrize("name", chart.GOLDEN_SETS)
def test_the_chart_lints_strictly(name: str) -> None:
    assert "0 chart(s) failed" in chart.lint(name)


def test_renders_equal_the_golden_ones() -> None:
    made = dict(chart.goldens())
    assert set(made) == set(chart.GOLDEN.iterdir())
    for path, text in made.items():
        assert text == path.read_text(), f"what changed in {path.name} is right? then: make golden"


def test_every_value_set_of_the_chart_is_rendered() -> None:
    files = {*(CHART / "ci").glob("*.yaml"), *(CHART / "profiles").glob("*.yaml")}
    assert files == {chart.values_of(name) for name in VALUE_SETS}


def test_what_artifact_hub_shows_of_the_crds_is_so() -> None:
    notes = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    shown = yaml.safe_load(notes["artifacthub.io/crds"])
    assert {(crd["kind"], crd["version"], crd["name"]) for crd in shown} == {
        (crd["spec"]["names"]["kind"], version["name"], crd["metadata"]["name"])
        for crd in definitions()
        for version in crd["spec"]["versions"]
    }
    examples = yaml.safe_load(notes["artifacthub.io/crdsExamples"])
    assert {APIKey, LoRAAdapter, ServingPool} == {type(parse_object(example)) for example in examples}


def test_a_package_has_the_definitions_of_the_repository_or_says_that_it_has_none(tmp_path: Path) -> None:
    helm("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("weft-*.tgz")
    only = ("--show-only", "templates/crds.yaml", "--set", "crds.keep=false", *QUICK)
    assert objects(helm("template", "weft", package, *only, *chart.KUBERNETES)) == definitions()
    bare = shutil.copytree(CHART, tmp_path / "bare", ignore=shutil.ignore_patterns("crds"))
    with pytest.raises(chart.HelmRefused, match="the chart has no files/crds"):
        helm("template", "weft", bare, *chart.KUBERNETES)


@pytest.mark.slow
def test_crds_are_kept_when_the_release_goes_unless_told_otherwise(rendered: Rendered) -> None:
    kept = [obj for obj in rendered["default"] if obj["kind"] == "CustomResourceDefinition"]
    dropped = objects(render("default", *QUICK, "--set", "crds.keep=false", "--show-only", "templates/crds.yaml"))
    assert len(kept) == len(dropped) == 3
    for with_policy, without in zip(kept, dropped, strict=True):
        annotated = {**without["metadata"], "annotations": {"helm.sh/resource-policy": "keep"}}
        assert with_policy == {**without, "metadata": annotated}
    assert [obj for obj in rendered["minimal"] if obj["kind"] == "CustomResourceDefinition"] == []


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_pod_says_what_the_restricted_standard_asks(rendered: Rendered, name: str) -> None:
    for pod, template in pod_templates(rendered[name]):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], pod
        assert spec["securityContext"]["runAsUser"] == 65532, pod
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"], pod
            assert not container["securityContext"]["allowPrivilegeEscalation"], pod
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, pod


@pytest.mark.parametrize("name", VALUE_SETS)
def test_only_those_who_ask_the_api_server_have_a_token(rendered: Rendered, name: str) -> None:
    with_token = {pod for pod, made in pod_templates(rendered[name]) if made["spec"]["automountServiceAccountToken"]}
    secrets = "--secrets=kubernetes" in chart.arguments_of(rendered[name], "depot")
    elects = name == "profile-production"
    ask = {"weft-operator": True, "weft-depot": secrets, "weft-scheduler": True, "weft-predictor": elects}
    assert with_token == {pod for pod, asks in ask.items() if asks}
    accounts = [obj for obj in rendered[name] if obj["kind"] == "ServiceAccount"]
    assert {obj["metadata"]["name"] for obj in accounts} == {f"weft-{component}" for component in COMPONENTS}
    assert not any(obj["automountServiceAccountToken"] for obj in accounts)


def test_pods_and_roles_use_the_accounts_that_values_name() -> None:
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/depot"}
    own = ("--set-json", f"depot.serviceAccountAnnotations={json.dumps(annotations)}")
    given = "operator.pod.spec.serviceAccountName=theirs"
    found = objects(render("default", *QUICK, *own, "--set", f"{given},depot.credentialNamespaces={{acme}}"))
    assert one(found, "ServiceAccount", "weft-depot")["metadata"]["annotations"] == annotations
    accounts = {obj["metadata"]["name"] for obj in found if obj["kind"] == "ServiceAccount"}
    used = {pod: template["spec"].get("serviceAccountName") for pod, template in pod_templates(found)}
    assert (used["weft-operator"], used["weft-depot"], used["weft-gateway"]) == ("theirs", "weft-depot", "weft-gateway")
    assert accounts == set(used.values()) - {"theirs", None}
    subjects = {
        (obj["roleRef"]["name"], subject["name"])
        for obj in found
        if obj["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in obj["subjects"]
    }
    operators = {"weft-operator", "weft-operator-pools", "weft-operator-weft-system"}
    own = {("weft-depot", "weft-depot"), ("weft-scheduler-lease", "weft-scheduler")}
    assert subjects == own | {(role, "theirs") for role in operators}


GIVEN = {"weft-batch-s3"}  # a Secret that value sets name, and people make


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_mount_has_its_volume_and_every_volume_its_object(rendered: Rendered, name: str) -> None:
    found = rendered[name]
    certificates = [obj["spec"]["secretName"] for obj in found if obj["kind"] == "Certificate"]
    made = {obj["metadata"]["name"] for obj in found if obj["kind"] in ("Secret", "ConfigMap")} | set(certificates)
    claims = {
        obj["metadata"]["name"]: {claim["metadata"]["name"] for claim in obj["spec"].get("volumeClaimTemplates", ())}
        for obj in found
        if obj["kind"] == "StatefulSet"
    }
    for pod, template in pod_templates(found):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        mounted = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", ())}
        assert mounted == set(volumes) | claims.get(pod, set()), pod
        for volume in volumes.values():
            needed = volume.get("secret", {}).get("secretName") or volume.get("configMap", {}).get("name")
            assert needed is None or needed in made | GIVEN, f"{pod}: {needed}"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_object_has_the_recommended_labels(rendered: Rendered, name: str) -> None:
    for obj in rendered[name]:
        if obj["kind"] == "CustomResourceDefinition":
            continue
        labels = obj["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "weft", obj["metadata"]["name"]
        assert {"app.kubernetes.io/name", "app.kubernetes.io/component", "helm.sh/chart"} <= set(labels)


def test_what_was_told_to_the_operator_restarts_it_when_it_changes() -> None:
    def checksum(*flags: str) -> str:
        found = objects(render("default", "--show-only", "templates/operator.yaml", *QUICK, *flags))
        template = one(found, "Deployment", "weft-operator")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum() == checksum()
    assert checksum() != checksum("--set", "runner.image.tag=other")


def test_a_digest_wins_over_the_tag() -> None:
    digest = f"sha256:{'c' * 64}"
    found = objects(render("default", *QUICK, "--set", f"image.digest={digest},image.tag=ignored"))
    assert {
        container["image"] for _, template in pod_templates(found) for container in template["spec"]["containers"]
    } == {f"weft-control@{digest}"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("supervisor.replicas=2", "needs database.mode: postgresql"),
        ("database.mode=postgresql", "needs database.postgresql.existingSecret"),
        ("poolNamespaces={a,b},tls.mode=certManager", "need tls.certManager.issuerRef with a ClusterIssuer"),
        ("depot.schemes={file}", "depot.fileRoot has to say"),
        ("depot.replicas=2", "depot.replicas above 1 needs depot.persistence.existingClaim"),
        ("depot.schemes={pvc}", "depot.claims has to say"),
        ("depot.claims[0].name=weights", "add pvc to depot.schemes"),
        ("gateway.ingress.enabled=true", "gateway.ingress.enabled needs gateway.ingress.hosts"),
        ("gateway.httpRoute.enabled=true", "needs gateway.httpRoute.parentRefs"),
        ("gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=11", "minReplicas is above maxReplicas"),
        ("gateway.autoscaling.enabled=true,gateway.resources=null", "gateway.resources.requests.cpu, which is missing"),
        ("gateway.settings.drain-seconds=5", "gateway.settings: the chart itself says --drain-seconds"),
        ("gateway.corsOrigins={a.example.com}", "/gateway/corsOrigins/0': 'a.example.com' does not match pattern"),
        ("gateway.settings.auth=false", "gateway.settings: the chart itself says --auth"),
        ("depot.settings.log-level=DEBUG", "depot.settings: the chart itself says --log-level"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_what_to_do(flags: str, said: str) -> None:
    assert said in refusal(flags)


def test_values_of_a_wrong_shape_are_refused_all_at_once() -> None:
    wrong = {
        "gateway.replica=2": "/gateway': additional properties 'replica' not allowed",
        "gateway.replicas=0": "/gateway/replicas': minimum: got 0, want 1",
        "tls.mode=off": "/tls/mode': value must be one of 'selfSigned', 'certManager', 'none'",
        "image.digest=latest": "/image/digest': 'latest' does not match pattern",
        "depot.schemes={ftp}": "/depot/schemes/0': value must be one of",
        "poolNamespaces={Serving}": "/poolNamespaces/0': 'Serving' does not match pattern",
        "depot.pod.spec.nodeSelectr.a=b": "/depot/pod/spec': additional properties 'nodeSelectr' not allowed",
        "runner.pod.spec.nodeSelector.a=b": "/runner/pod/spec': additional properties 'nodeSelector' not allowed",
        "operator.modelCache.hostPaths={/srv/}": "/operator/modelCache/hostPaths/0': '/srv/' does not match pattern",
        "operator.modelCache.claims={cache}": "/operator/modelCache/claims/0': 'cache' does not match pattern",
        "runner.resources.limit.cpu=1": "/runner/resources': additional properties 'limit' not allowed",
    }
    refused = refusal(",".join(wrong))
    assert [said for said in wrong.values() if said not in refused] == [], refused


def refusal(flags: str) -> str:
    with pytest.raises(chart.HelmRefused) as refused:
        render("default", *QUICK, "--set", flags)
    return " ".join(str(refused.value).split())


def test_what_values_say_of_pods_is_said_of_every_pod_of_the_installation(rendered: Rendered) -> None:
    found = rendered["gpu-pools"]
    specs = {pod: template["spec"] for pod, template in pod_templates(found) if pod != "weft-test"}
    assert len(specs) == len(COMPONENTS)
    for pod, spec in specs.items():
        assert spec["priorityClassName"] == "system-cluster-critical", pod
        assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64"}, pod
        assert [toleration["key"] for toleration in spec["tolerations"]] == ["dedicated"], pod
    assert [pod for pod, spec in specs.items() if "affinity" in spec] == ["weft-gateway"]
    service = one(found, "Service", "weft-gateway")
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("LoadBalancer", 8080)
    assert service["metadata"]["annotations"] == {"example.com/internal": "true"}


def test_of_two_items_of_a_name_the_last_one_counts() -> None:
    """Helm 4 is refused where a list has a name twice, and an upgrade by Helm 3 keeps either of them."""
    names = {"env": "name", "volumeMounts": "mountPath", "volumes": "name"}

    def pod(said: str) -> Json:
        env = [{"name": name, "value": said} for name in ("HTTPS_PROXY", "HOME", "OTEL_TRACES_SAMPLER", "URL")]
        mounts = [{"name": "tmp", "mountPath": "/tmp", "subPath": said}]
        return {
            "spec": {"volumes": [{"name": "tmp", "hostPath": {"path": f"/{said}"}}]},
            "container": {"env": env, "volumeMounts": mounts},
        }

    flags = [f"common.pod={json.dumps(pod('common'))}"]
    flags += [f"{component}.pod={json.dumps(pod(component))}" for component in (*COMPONENTS, "runner")]
    options = [option for flag in flags for option in ("--set-json", flag)]
    found = objects(render("default", *QUICK, "--set", "tracing.endpoint=http://collector:4317", *options))
    site = one(found, "ConfigMap", "weft-runner-defaults")["data"]["runner-defaults.yaml"]
    lists = {"weft-runner": yaml.safe_load(site)}
    lists |= {pod: {**template["spec"], **template["spec"]["containers"][0]} for pod, template in pod_templates(found)}
    assert len(lists) == len(COMPONENTS) + 2
    for pod, fields in lists.items():
        component, own = pod.removeprefix("weft-"), {}
        for field, name in names.items():
            assert len({item[name] for item in fields[field]}) == len(fields[field]), (pod, field)
            own[field] = {item[name]: item for item in fields[field]}
        said = [own["env"][name]["value"] for name in ("HTTPS_PROXY", "HOME", "OTEL_TRACES_SAMPLER")]
        said += [own["volumeMounts"]["/tmp"]["subPath"], own["volumes"]["tmp"]["hostPath"]["path"].strip("/")]
        assert said == ["common" if component == "test" else component] * len(said), pod
    assert own["env"]["URL"]["value"].startswith("http://weft-gateway"), "what the test itself needs is its own"


def test_supervisors_on_postgresql_are_several_and_keep_nothing_of_their_own(rendered: Rendered) -> None:
    found = rendered["postgres"]
    supervisor = one(found, "StatefulSet", "weft-supervisor")["spec"]
    assert (supervisor["replicas"], "volumeClaimTemplates" in supervisor) == (2, False)
    (container,) = supervisor["template"]["spec"]["containers"]
    (database,) = [item for item in container["env"] if item["name"] == "WEFT_SUPERVISOR__DATABASE"]
    assert database["valueFrom"] == {"secretKeyRef": {"name": "weft-database", "key": "url"}}
    assert one(found, "PodDisruptionBudget", "weft-supervisor")["spec"]["maxUnavailable"] == 1
    to_database = [{"ports": [{"port": 5432}], "to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}]}]
    assert [
        rule
        for rule in one(found, "NetworkPolicy", "weft-supervisor")["spec"]["egress"]
        if rule["ports"] == to_database[0]["ports"]
    ] == to_database


def test_the_batch_service_on_postgresql_and_s3_keeps_nothing_of_its_own(rendered: Rendered) -> None:
    found = rendered["postgres"]
    batch = one(found, "StatefulSet", "weft-batch")["spec"]
    assert "volumeClaimTemplates" not in batch
    (container,) = batch["template"]["spec"]["containers"]
    assert "WEFT_BATCH__DATABASE" in {item["name"] for item in container["env"]}
    assert {"--files=s3://batches/weft", "--s3-credentials=/etc/weft/s3"} <= set(container["args"])
    dns, database, storage = one(found, "NetworkPolicy", "weft-batch")["spec"]["egress"]
    assert {port["port"] for port in (*dns["ports"], *database["ports"])} == {53, 5432}
    assert all("169.254.0.0/16" in peer["ipBlock"]["except"] for peer in storage["to"][:1])
    own = chart.objects(chart.render("default", *chart.QUICK, "--set", "batch.s3.files=s3://b/p"))
    assert "--s3-pod-identity" in chart.arguments_of(own, "batch")
    default = one(rendered["default"], "StatefulSet", "weft-batch")["spec"]
    assert default["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert one(rendered["default"], "NetworkPolicy", "weft-batch")["spec"]["egress"] == []


ASK = {"scheduler": ("gateway", "supervisor", "operator"), "predictor": ("gateway", "supervisor")}


@pytest.mark.parametrize("component", ASK)
def test_of_two_pods_one_acts_by_a_lease_and_peers_know_both_addresses(rendered: Rendered, component: str) -> None:
    found, name = rendered["profile-production"], f"weft-{component}"
    pods = one(found, "Service", f"{name}-pods")["spec"]
    assert (pods["clusterIP"], pods["publishNotReadyAddresses"]) == ("None", True)
    assert pods["selector"] == one(found, "StatefulSet", name)["spec"]["selector"]["matchLabels"]
    (port,) = pods["ports"]
    assert port["port"] == 7400, "behind such a Service it is the pod's own"
    assert f"--lease=weft-system/{name}" in chart.arguments_of(found, component)
    for peer in ASK[component]:
        assert f"--{component}={name}-pods.weft-system.svc:7400" in chart.arguments_of(found, peer), peer
    rules = one(found, "Role", f"{name}-lease")["rules"]
    assert [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in rules] == [
        (["leases"], None, ["create"]),
        (["leases"], [name], ["get", "update"]),
    ]
    egress = one(found, "NetworkPolicy", name)["spec"]["egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in egress] == [[443, 6443]]


def test_two_depots_share_a_claim_and_one_acts_by_a_lease() -> None:
    values = "depot.replicas=2,depot.persistence.existingClaim=contents,depot.credentialNamespaces={weft-system}"
    found = chart.objects(chart.render("default", *chart.QUICK, "--set", values))
    depot = one(found, "StatefulSet", "weft-depot")["spec"]
    assert "volumeClaimTemplates" not in depot
    pod = depot["template"]["spec"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "contents"}} in pod["volumes"]
    assert pod["automountServiceAccountToken"]
    assert "--lease=weft-system/weft-depot" in chart.arguments_of(found, "depot")
    for peer in ("gateway", "operator"):
        assert "--depot=http://weft-depot-pods.weft-system.svc:7400" in chart.arguments_of(found, peer)
    assert one(found, "Role", "weft-depot-lease")["rules"][1]["resourceNames"] == ["weft-depot"]
    assert one(found, "Role", "weft-depot")["rules"][0]["resources"] == ["secrets"]
    ways = one(found, "NetworkPolicy", "weft-depot")["spec"]["egress"]
    assert [443, 6443] in [[port["port"] for port in way.get("ports", ())] for way in ways]


def test_one_predictor_asks_no_api_server_and_peers_know_it_by_the_name_of_two(rendered: Rendered) -> None:
    found, name = rendered["default"], "weft-predictor"
    assert not any(argument.startswith("--lease") for argument in chart.arguments_of(found, "predictor"))
    kinds = {obj["kind"] for obj in found if obj["metadata"]["name"] == name}
    assert kinds == {"NetworkPolicy", "Service", "ServiceAccount", "StatefulSet"}
    one(found, "Service", f"{name}-pods")
    assert one(found, "NetworkPolicy", name)["spec"]["egress"] == []
    assert f"--predictor={name}-pods.weft-system.svc:7400" in chart.arguments_of(found, "gateway")


def test_schedulers_are_the_same_pods_whatever_their_number() -> None:
    """Another template would restart the one that acts: new requests waited 3 to 10 s for it."""
    one_pod, two = (
        one(objects(render("default", *QUICK, "--set", f"scheduler.replicas={n}")), "StatefulSet", "weft-scheduler")[
            "spec"
        ]
        for n in (1, 2)
    )
    assert (one_pod["replicas"], two["replicas"]) == (1, 2)
    assert one_pod["template"] == two["template"]


def test_gateways_are_scaled_by_their_autoscaler_alone(rendered: Rendered) -> None:
    deployment = one(rendered["cert-manager"], "Deployment", "weft-gateway")["spec"]
    assert "replicas" not in deployment
    assert "topologySpreadConstraints" in deployment["template"]["spec"]
    scaler = one(rendered["cert-manager"], "HorizontalPodAutoscaler", "weft-gateway")["spec"]
    assert (scaler["scaleTargetRef"]["name"], scaler["minReplicas"], scaler["maxReplicas"]) == ("weft-gateway", 3, 20)
    assert [metric["resource"]["name"] for metric in scaler["metrics"]] == ["cpu"]
    assert one(rendered["default"], "Deployment", "weft-gateway")["spec"]["replicas"] == 2


def test_a_security_context_of_the_cluster_takes_the_place_of_ours() -> None:
    """OpenShift gives users and groups itself."""
    ours = json.dumps({"spec": {"securityContext": {"runAsUser": None}}})
    own = json.dumps({"container": {"securityContext": {"readOnlyRootFilesystem": False}}})
    flags = ("--set-json", f"common.pod={ours}", "--set-json", f"depot.pod={own}")
    pods = dict(pod_templates(objects(render("default", *QUICK, *flags))))
    assert {template["spec"]["securityContext"]["runAsUser"] for template in pods.values()} == {None}
    open_roots = [
        pod for pod, template in pods.items()
        if not template["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    ]  # fmt: skip
    assert open_roots == ["weft-depot"]


def test_a_component_of_several_pods_has_a_disruption_budget(rendered: Rendered) -> None:
    def budgets(found: list[Json]) -> dict[str, Json]:
        return {obj["metadata"]["name"]: obj["spec"] for obj in found if obj["kind"] == "PodDisruptionBudget"}

    default = budgets(rendered["default"])
    assert set(default) == {"weft-gateway", "weft-operator"}
    assert {budget["maxUnavailable"] for budget in default.values()} == {1}
    assert budgets(rendered["minimal"]) == {}
    assert budgets(rendered["cert-manager"])["weft-gateway"]["maxUnavailable"] == "50%"
    assert set(budgets(rendered["profile-production"])) == {
        f"weft-{component}" for component in COMPONENTS if component not in ("depot", "batch")
    }


def test_ingress_and_route_lead_to_the_gateways_service(rendered: Rendered) -> None:
    ingress = one(rendered["cert-manager"], "Ingress", "weft-gateway")["spec"]
    (rule,) = ingress["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == ("weft.example.com", "/", "Prefix")
    assert path["backend"]["service"] == {"name": "weft-gateway", "port": {"name": "http"}}
    assert ingress["tls"] == [{"hosts": ["weft.example.com"], "secretName": "weft-example-com"}]
    route = one(objects(render("default", *QUICK, *HTTP_ROUTE)), "HTTPRoute", "weft-gateway")["spec"]
    assert route["parentRefs"] == [{"name": "edge", "namespace": "infra", "sectionName": "https"}]
    assert [rule["backendRefs"] for rule in route["rules"]] == [[{"name": "weft-gateway", "port": 80}]]
    assert {"filters", "matches", "timeouts"} <= set(route["rules"][0])


def test_a_gateway_without_keys_answers_by_the_names_that_lead_to_it(rendered: Rendered) -> None:
    """A depot without certificates does the same."""

    def hosts(found: list[Json], component: str) -> AllowedHosts | None:
        flags = [flag for flag in chart.arguments_of(found, component) if flag.startswith("--allowed-hosts=")]
        return AllowedHosts(map(host_name, json.loads(flags[0].partition("=")[2]))) if flags else None

    values = {
        "auth": False,
        "allowedHosts": ["gpu-box"],
        "ingress": {"enabled": True, "hosts": [{"host": "in.example.com"}, {"host": "*.in.example.com"}]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["route.example.com"]},
    }
    flags = ("--set-json", f"gateway={json.dumps(values)}", "--set", "clusterDomain=site.example")
    found = objects(render("default", *QUICK, *flags))
    given = ("gpu-box", "in.example.com", "a.in.example.com", "route.example.com", "127.0.0.1", "localhost")
    for component, services, others in (
        ("gateway", ("weft-gateway",), given),
        ("depot", ("weft-depot", "weft-depot-pods"), ()),
    ):
        allowed = hosts(found, component)
        assert allowed
        ends = ("", ".weft-system", ".weft-system.svc", ".weft-system.svc.site.example")
        names = (*(name + end for name in services for end in ends), *others)
        assert [name for name in names if not allowed.allows(f"{name}:80".encode())] == []
        for name in ("weft-gateway.other", "weft-depot.weft-system.svc.evil.example", "example.com", "evil.example"):
            assert not allowed.allows(name.encode()), name
    off = json.dumps(values | {"ingress": {"enabled": False, "hosts": [{"host": "in.example.com"}]}})
    without = hosts(objects(render("default", *QUICK, "--set-json", f"gateway={off}")), "gateway")
    assert without
    assert not without.allows(b"in.example.com")
    assert [hosts(rendered["default"], component) for component in ("gateway", "depot")] == [None, None]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_no_crowd_of_clients_keeps_the_kubelet_or_prometheus_out(rendered: Rendered, name: str) -> None:
    """Probes have a port of their own in every pod."""
    found = rendered[name]
    for pod, template in pod_templates(found):
        (container,) = template["spec"]["containers"]
        probes = {probe["httpGet"]["port"] for kind, probe in container.items() if kind.endswith("Probe")}
        assert probes == (set() if pod == "weft-test" else {"probes"}), pod
        if probes:
            assert {"name": "probes", "containerPort": 7401} in container["ports"], pod
            assert "--probes=0.0.0.0:7401" in container["args"], pod
    for policy in (obj for obj in found if obj["kind"] == "NetworkPolicy"):
        peers = [rule["from"] for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": 7401}]]
        assert len(peers) == (name == "cert-manager"), policy["metadata"]["name"]


def test_without_batches_there_is_no_batch_service() -> None:
    found = objects(render("default", *QUICK, "--set", "batch.enabled=false"))
    kinds = {"StatefulSet", "Service", "ServiceAccount", "NetworkPolicy"}
    assert not [obj for obj in found if obj["kind"] in kinds and obj["metadata"]["name"] == "weft-batch"]
    assert not any(argument.startswith("--batch") for argument in chart.arguments_of(found, "gateway"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("podMonitor.enabled=true", "podMonitor.enabled needs the Prometheus operator"),
        ("prometheusRule.enabled=true", "prometheusRule.enabled needs the Prometheus operator"),
        ("gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=edge", "needs the Gateway API"),
    ],
)
def test_objects_of_others_ask_for_their_apis(flags: str, said: str) -> None:
    with pytest.raises(chart.HelmRefused, match=said):
        helm("template", "weft", CHART, "--kube-version", chart.tools.kubernetes(), "--set", flags)


def test_values_that_null_a_default_are_left_out() -> None:
    pod = dict(pod_templates(objects(render("default", *QUICK, "--set", "gateway.resources=null"))))["weft-gateway"]
    assert "resources" not in pod["spec"]["containers"][0]


def test_names_that_yaml_reads_as_something_else_stay_names() -> None:
    """A namespace may be named `no`, `on` or `1`: Helm writes text, and YAML 1.1 takes that for other things."""
    flags = (*QUICK, "--set", "poolNamespaces={on,no},depot.credentialNamespaces={yes},podMonitor.enabled=true")
    found = [value for obj in objects(render("default", *flags, namespace="no")) for value in _named(obj)]
    assert {"no", "on", "yes"} <= set(found)
    assert [value for value in found if not isinstance(value, str)] == []


NAMED = ("namespace", "kubernetes.io/metadata.name", "app.kubernetes.io/instance")


def _named(node: Any) -> Iterator[Any]:
    """What stands in `node` where a namespace or a release is named."""
    if isinstance(node, dict):
        for key, value in cast("dict[str, Any]", node).items():
            if key in NAMED and not isinstance(value, dict):
                yield value
            yield from _named(value)
    elif isinstance(node, list):
        for value in cast("list[Any]", node):
            yield from _named(value)


def test_spans_reach_a_collector_from_every_process_that_makes_some() -> None:
    endpoint = "tracing.endpoint=http://collector.observability:4317,tracing.ratio=0.5"
    text = render("default", *QUICK, "--set", endpoint, "--set-json", 'networkPolicy.tracingTo=[{"podSelector":{}}]')
    found, expected = objects(text), {"ports": [{"port": 4317}], "to": [{"podSelector": {}}]}
    for component in ("gateway", "scheduler", "predictor", "batch", "runner"):
        egress = one(found, "NetworkPolicy", f"weft-{component}")["spec"]["egress"]
        assert expected in egress, component
        assert any({"port": 53, "protocol": "UDP"} in rule["ports"] for rule in egress), f"{component} asks DNS"
    for component in ("supervisor", "depot"):
        assert expected not in one(found, "NetworkPolicy", f"weft-{component}")["spec"]["egress"], component
    told = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.observability:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.5",
    }
    for pod, template in pod_templates(found):
        (container,) = template["spec"]["containers"]
        if pod == "weft-test":
            continue
        assert told.items() <= {entry["name"]: entry.get("value") for entry in container["env"]}.items(), pod
    assert all(f"name: {name}" in text for name in told), "the operator's runners have them by its site file"

"""Alerts and dashboards use series and labels that the processes have, and each alert fires for its cause."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import weft.telemetry.invariants
import weft.wire.errors
import weft_batch.metrics
import weft_depot.metrics
import weft_predictor.metrics
import weft_scheduler.metrics
import weft_supervisor.metrics
from harness import chart
from harness.chart import CHART, QUICK, Json, objects, one, render
from weft_gateway.core import Gateway, GatewayConfig
from weft_gateway.shell import GatewayMetrics
from weft_operator.kubernetes import Metrics as OperatorMetrics
from weft_runner.shell.adapter_series import LABELS
from weft_runner.shell.metrics import FIGURES, RunnerMetrics
from weft_scheduler.metrics import SchedulerMetrics

MODULES = (  # whose metrics are in the process's own registry
    weft.telemetry.invariants,
    weft.wire.errors,
    weft_batch.metrics,
    weft_depot.metrics,
    weft_predictor.metrics,
    weft_scheduler.metrics,
    weft_supervisor.metrics,
)
SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
TARGET = {"namespace", "pod", "container", "job", "instance"}  # labels that the Prometheus operator adds
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"}
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
SCHEMA = chart.ROOT / "tests" / "harness" / "grafana_schema"
RULES = ("--set", "prometheusRule.enabled=true", "--show-only", "templates/prometheusrule.yaml")


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str] | None]:
    """Name of a series -> its labels; None: a collector that says its labels only once it has samples."""
    registry = CollectorRegistry()
    SchedulerMetrics(registry)
    OperatorMetrics(registry)
    GatewayMetrics(Gateway(GatewayConfig(), "gateway", lambda _: b""), registry)
    runner = CollectorRegistry()  # it has a name in common with the gateway
    RunnerMetrics(runner, "base")
    found: dict[str, set[str] | None] = {}
    for module in MODULES:
        assert any(isinstance(value, MetricWrapperBase) for value in vars(module).values()), module
    for collector in (each for some in (registry, runner, REGISTRY) for each in some._collector_to_names):  # pyright: ignore[reportPrivateUsage] (what it has before any sample)
        labels: Any = getattr(collector, "_labelnames", None)
        for family in collector.collect():
            for suffix in SAMPLES.get(family.type, ("",)):
                found[family.name + suffix] = None if labels is None else {*labels}
    for row in FIGURES:  # one collector has those that it reads
        for name, labels in ((f"weft_runner_{row.own_name}", ()), (f"vllm:{row.vllm}", LABELS)):
            for suffix in SAMPLES[str(row.kind._type)]:  # pyright: ignore[reportPrivateUsage]
                if name + suffix in found:
                    found[name + suffix] = {*labels, *row.labels}
    return found


def rules() -> list[Json]:
    spec = one(objects(render("default", *QUICK, *RULES)), "PrometheusRule", "weft-alerts")["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield where it stands, and the expression, of every rule and panel."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for variable in dashboard["templating"]["list"]:
            if asked := re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]):
                yield f"{path.stem}: ${variable['name']}", f"sum by ({asked[2]}) ({asked[1]})"


def read(expression: str) -> tuple[set[str], set[str]]:
    """Parse PromQL into the names of series, and the labels that it groups or selects by."""
    text = re.sub(r'"[^"]*"', '""', expression)
    selected = {label for inner in re.findall(r"\{([^}]*)\}", text) for label in re.findall(r"(\w+)\s*[=!]", inner)}
    grouped = {label for inner in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", text) for label in re.findall(r"\w+", inner)}
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on)\s*\([^)]*\)", " ", text)
    return set[str](re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()", bare)) - WORDS, selected | grouped


def test_every_metric_and_label_of_alerts_and_dashboards_exists(metrics: dict[str, set[str] | None]) -> None:
    known = metrics | {rule["record"]: {"pool"} for rule in rules() if "record" in rule}
    checked = 0
    for where, expression in expressions():
        names, labels = read(expression)
        assert names or expression.startswith("vector("), where
        assert names <= set(known), f"{where}: nothing has {names - set(known)}"
        if all(known[name] is not None for name in names):
            have = {label for name in names for label in known[name] or ()} | TARGET | {"le"}
            assert labels <= have, f"{where}: {names} have no label {labels - have}"
        checked += len(names)
    assert checked > len(rules())


def test_a_metric_that_does_not_exist_is_noticed(metrics: dict[str, set[str] | None]) -> None:
    names, labels = read('sum by (pool) (rate(weft_gateway_request_total{status=~"5.."}[5m])) > 0 and up')
    assert (names - set(metrics), labels) == ({"weft_gateway_request_total", "up"}, {"pool", "status"})


def test_dashboards_are_whole() -> None:
    assert {path.stem for path in DASHBOARDS} == {"overview", "adapters", "runners", "control-plane"}
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({dashboard["uid"] for dashboard in dashboards}) == len(dashboards)
    for dashboard in dashboards:
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
        assert all(panel["title"] and panel["description"].endswith(".") for panel in panels)


@pytest.mark.long
def test_grafanas_own_schema_takes_the_dashboards(tmp_path: Path) -> None:
    """Read with the strict reader, which knows each field of dashboards, panels and queries."""
    if (go := shutil.which("go")) is None:
        pytest.skip("no Go: apt-get install golang-go")

    def faults(*paths: Path) -> str:
        return subprocess.run(
            [go, "run", "-C", SCHEMA, ".", *paths], capture_output=True, text=True, check=False
        ).stdout

    wrong = json.loads(DASHBOARDS[0].read_text())
    wrong["panels"][0]["targets"][0]["expression"] = wrong["panels"][0]["targets"][0].pop("expr")
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    noticed = faults(tmp_path / "wrong.json", *DASHBOARDS).splitlines()
    assert noticed[0].endswith("panels[0].targets[0].expr: required field is missing from input")
    assert noticed[1:] == ["panels[0].targets[0].Dataquery: unexpected field 'expression'"]


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds(rendered: dict[str, list[Json]]) -> None:
    made = [obj for obj in rendered["cert-manager"] if obj["metadata"]["name"].startswith("weft-dashboard-")]
    assert len(made) == len(DASHBOARDS)
    for obj in made:
        assert obj["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = obj["data"].items()
        assert json.loads(text) == json.loads((CHART / "files/dashboards" / name.removeprefix("weft-")).read_text())


def test_every_alert_has_a_section_of_the_runbooks() -> None:
    headings = re.findall(r"(?m)^## (.+)$", (chart.ROOT / "docs" / "runbooks.md").read_text())
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) > 15
    for alert in alerts:
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert (page, anchor in anchors) == ("docs/runbooks.md", True), alert["alert"]
        assert alert["labels"]["severity"] in ("critical", "warning")


def test_alerts_can_be_left_out_and_objectives_set() -> None:
    flags = "prometheusRule.disabled={WeftPredictorAway},prometheusRule.objectives.availability=0.99"
    found = objects(render("default", *QUICK, *RULES, "--set", flags))
    made = [rule for group in found[0]["spec"]["groups"] for rule in group["rules"]]
    assert "WeftPredictorAway" not in {rule.get("alert") for rule in made}
    assert {"record": "weft:availability:objective", "expr": "vector(0.99)"} in made


def test_prometheus_is_given_a_key_for_gateways(rendered: dict[str, list[Json]]) -> None:
    others, gateway = one(rendered["cert-manager"], "PodMonitor", "weft-control-plane")["spec"]["podMetricsEndpoints"]
    assert gateway["authorization"] == {"type": "Bearer", "credentials": {"name": "weft-metrics-key", "key": "key"}}
    assert "authorization" not in others, "the other processes have no use for it"
    assert (others["port"], gateway["port"]) == ("probes", "probes")
    component = {"sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"], "regex": "gateway"}
    assert [each["relabelings"] for each in (others, gateway)] == [
        [component | {"action": action}] for action in ("drop", "keep")
    ]


# ------------------------------------------------------------------------------------------------------- promtool


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool: go install github.com/prometheus/prometheus/cmd/promtool@v0.316.0")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules_and_every_expression(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    named = [
        {"record": f"test:panel:{i}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for i, (_, expression) in enumerate(expressions())
    ]
    spec = one(objects(render("default", *QUICK, *RULES)), "PrometheusRule", "weft-alerts")["spec"]
    file.write_text(yaml.safe_dump({"groups": [*spec["groups"], {"name": "panels", "rules": named}]}))
    promtool("check", "rules", file)


# Everything is there and well: no alert. A counter `a+bxn` grows by b a minute.
WELL = {
    "weft_operator_leader": "1x600",
    "weft_scheduler_leader": "1x600",
    "weft_supervisor_highest_term": "1x600",
    "weft_predictor_leader": "1x600",
    "weft_depot_blobs": "3x600",
    'weft_gateway_requests_total{status="200"}': "0+100x600",
    'weft_gateway_requests_total{status="503"}': "0x600",
    'weft_slo_requests_total{pool="p",ttft="met",token_time="met"}': "0+100x600",
    'weft_slo_requests_total{pool="p",ttft="missed",token_time="met"}': "0x600",
    'weft_scheduler_queue_length{pool="p"}': "20x600",
    'weft_scheduler_ready_runners{pool="p"}': "1x600",
    'weft_scheduler_wanted_runners{pool="p"}': "1x600",
    "weft_supervisor_runners_lost_total": "0x600",
    'weft_runner_ended_total{namespace="n",reason="load_failed"}': "0x600",
    'weft_runner_corrupt_artifacts_total{namespace="n",pod="r"}': "0x600",
    'weft_operator_reconciles_total{kind="LoRAAdapter",result="failed"}': "0x600",
    'weft_depot_resolves_total{kind="adapter",reason="SourceUnreachable"}': "0x600",
    'weft_depot_resolves_total{kind="adapter",reason="DepotFull"}': "0x600",
    "weft_supervisor_store_failures_total": "0x600",
    "weft_gateway_outcomes_dropped_total": "0x600",
    'weft_invariant_violations_total{check="pages",pod="s"}': "0x600",
}
ILL: dict[str, dict[str, str | None]] = {  # alert -> what is different; None: the series is away
    "WeftErrorBudgetBurnsFast": {'weft_gateway_requests_total{status="503"}': "0+10x600"},
    "WeftErrorBudgetBurns": {'weft_gateway_requests_total{status="503"}': "0+1x600"},
    "WeftLatencyBudgetBurns": {'weft_slo_requests_total{pool="p",ttft="missed",token_time="met"}': "0+100x600"},
    "WeftRunnersLost": {"weft_supervisor_runners_lost_total": "0+1x600"},
    "WeftPoolWithoutRunner": {'weft_scheduler_ready_runners{pool="p"}': "0x600"},
    "WeftQueueGrows": {'weft_scheduler_queue_length{pool="p"}': "0+5x600"},
    "WeftAdapterLoadsFail": {'weft_runner_ended_total{namespace="n",reason="load_failed"}': "0+1x600"},
    "WeftDiskLosesBits": {'weft_runner_corrupt_artifacts_total{namespace="n",pod="r"}': "0+1x600"},
    "WeftOperatorNotLeading": {"weft_operator_leader": None},
    "WeftReconcilesFail": {'weft_operator_reconciles_total{kind="LoRAAdapter",result="failed"}': "0+2x600"},
    "WeftSchedulerAway": {"weft_scheduler_leader": "2x600"},
    "WeftSupervisorAway": {"weft_supervisor_highest_term": None},
    "WeftPredictorAway": {"weft_predictor_leader": "0x600"},
    "WeftDepotAway": {"weft_depot_blobs": None},
    "WeftDepotErrors": {'weft_depot_resolves_total{kind="adapter",reason="SourceUnreachable"}': "0+1x600"},
    "WeftDepotFull": {'weft_depot_resolves_total{kind="adapter",reason="DepotFull"}': "0+1x600"},
    "WeftStoreAway": {"weft_supervisor_store_failures_total": "0+1x600"},
    "WeftOutcomesDropped": {"weft_gateway_outcomes_dropped_total": "0+1x600"},
    "WeftInvariantViolated": {'weft_invariant_violations_total{check="pages",pod="s"}': "0+1x600"},
}


def test_each_alert_fires_for_its_cause_and_none_while_all_is_well(tmp_path: Path) -> None:
    """In Prometheus' own rule engine, after eight hours."""
    spec = one(objects(render("default", *QUICK, *RULES)), "PrometheusRule", "weft-alerts")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert set(ILL) == set(alerts)
    cases = [_case("all is well", {}, dict.fromkeys(alerts, 0))]
    cases += [_case(name, change, {name: 1}) for name, change in ILL.items()]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": cases}))
    promtool("test", "rules", tmp_path / "cases.yaml")


def _case(name: str, change: dict[str, str | None], firing: dict[str, int]) -> Json:
    series = {**WELL, **change}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": of, "values": values} for of, values in series.items() if values is not None],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
                "eval_time": "8h",
                "exp_samples": [{"labels": "{}", "value": count}],
            }
            for alert, count in firing.items()
        ],
    }

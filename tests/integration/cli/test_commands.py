"""The command against a real controller: what is printed where, and the exit code."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.processes import started, tied
from weft_cli.client import ControllerClient
from weft_cli.main import main
from weft_operator.local import persistence

CRDS = Path(__file__).parents[3] / "crds"
DIGEST = "sha256:" + "a" * 64
MANY = """
apiVersion: serving.weft.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: a{number}, namespace: many}}
spec: {{poolRef: {{name: base, namespace: default}}, source: {{uri: "file:a{number}"}}}}
"""


def conditions_of(reason: str, message: str, *kinds: str, status: str = "False") -> list[dict[str, str]]:
    """Conditions of these kinds."""
    known = {"status": status, "reason": reason, "message": message, "lastTransitionTime": "2023-11-14T22:13:20Z"}
    return [{"type": kind, **known} for kind in kinds]


READY: dict[str, Any] = {
    "observedGeneration": 1, "digest": DIGEST, "rank": 8, "eosTokenIds": [151645], "modelName": "acme/upper",
    "unavailableRunners": 0, "conditions": conditions_of("Published", "serves", "Ready", status="True"),
}  # fmt: skip
TOO_LARGE = conditions_of("RankTooLarge", "rank 128, the pool takes 64", "Validated", "Fetched", "Ready")
REFUSED: dict[str, Any] = {"observedGeneration": 1, "conditions": TOO_LARGE}


def run(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def applied(controller: Any, manifests: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    assert main(["apply", "-f", str(manifests)]) == 0
    controller.set_status("LoRAAdapter", "acme", "upper", READY)
    controller.set_status("LoRAAdapter", "globex", "lower", REFUSED)
    capfd.readouterr()
    return controller


def test_apply_says_what_became_of_each_object(
    controller: Any, manifests: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capfd, "apply", "-f", str(manifests))
    assert code == 0
    assert out.splitlines() == [
        "loraadapter/upper (acme) created",
        "loraadapter/lower (globex) created",
        "servingpool/base (default) created",
    ]
    assert set(run(capfd, "apply", "-f", str(manifests))[1].split()) >= {"unchanged"}
    path = manifests / "pool.yaml"
    path.write_text(path.read_text().replace("replicas: 2", "replicas: 3"))
    assert run(capfd, "apply", "-f", str(path))[1] == "servingpool/base (default) configured\n"


def piped(text: bytes, *argv: str) -> tuple[int, str, str]:
    done = subprocess.run(tied(sys.executable, "-m", "weft_cli", *argv), input=text, capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_manifests_come_from_standard_input(controller: Any, manifests: Path) -> None:
    adapters = (manifests / "adapters.yaml").read_bytes()
    code, out, err = piped(adapters, "apply", "-f", str(manifests / "pool.yaml"), "-f", "-")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "servingpool/base (default) created",
        "loraadapter/upper (acme) created",
        "loraadapter/lower (globex) created",
    ]
    code, out, _ = piped(adapters, "delete", "-f", "-")
    assert (code, out) == (0, "loraadapter/upper deleted\nloraadapter/lower deleted\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "<stdin>: no object to be applied"),
        (b"kind: ServingPool\napiVersion: v1\n", "<stdin>, document 1, apiVersion"),
        (b"\xff", "<stdin>: not UTF-8 text"),
        (b"#" * ((16 << 20) + 1), "<stdin>: more than 16777216 bytes"),
    ],
    ids=["empty", "wrong", "binary", "endless"],
)
def test_standard_input_that_is_no_manifest_is_named(
    controller: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: bytes, says: str
) -> None:
    (tmp_path / "stdin").write_bytes(text)
    before = os.dup(0)
    with (tmp_path / "stdin").open() as stdin:
        os.dup2(stdin.fileno(), 0)
        try:
            code, out, err = run(capfd, "apply", "-f", "-")
        finally:
            os.dup2(before, 0)
            os.close(before)
    assert (code, out) == (2, "")
    assert says in err


def test_a_wrong_manifest_is_told_with_file_and_field_and_nothing_is_applied(
    controller: Any, manifests: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (manifests / "bad.yaml").write_text("kind: ServingPool\napiVersion: v1\n")
    code, out, err = run(capfd, "apply", "-f", str(manifests))
    assert (code, out) == (2, "")
    assert "bad.yaml" in err
    assert "apiVersion" in err
    assert controller.store.objects() == []


def test_what_cannot_change_is_refused_and_the_rest_is_applied(
    applied: Any, manifests: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = manifests / "pool.yaml"
    path.write_text(path.read_text().replace("file:model", "file:other"))
    code, out, err = run(capfd, "apply", "-f", str(manifests))
    assert code == 2
    assert out.splitlines() == ["loraadapter/upper (acme) unchanged", "loraadapter/lower (globex) unchanged"]
    assert "spec.model.uri" in err
    assert "cannot change" in err


def test_adapters_are_listed_as_kubectl_would(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "get", "lora", "-A")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["NAMESPACE", "NAME", "POOL", "MODEL", "READY", "REASON", "UNAVAILABLE", "AGE"]
    assert lines[1][:7] == ["acme", "upper", "base", "acme/upper", "True", "Published", "0"]
    assert lines[2][:7] == ["globex", "lower", "base", "<none>", "False", "RankTooLarge", "<none>"]


def test_a_new_source_that_is_refused_shows_beside_the_content_that_is_served(
    applied: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ready, fetched = READY["conditions"][0], REFUSED["conditions"][1]
    conditions = [fetched, ready | {"reason": "UpdateFailed", "message": "still serves"}]
    status = READY | {"conditions": conditions, "chatTemplate": {"from": "Adapter"}}
    applied.set_status("LoRAAdapter", "acme", "upper", status)
    line = run(capfd, "get", "lora", "-n", "acme")[1].splitlines()[1].split()
    assert line[3:5] == ["True", "UpdateFailed"]
    described = run(capfd, "describe", "lora", "upper", "-n", "acme")[1]
    assert "UpdateFailed" in described
    assert "Template:    the adapter's own\n" in described
    assert "rank 128, the pool takes 64" in described
    assert "RankTooLarge: train with a smaller rank" in described


@pytest.mark.parametrize(("kind", "plural"), [("LoRAAdapter", "loraadapters"), ("ServingPool", "servingpools")])
def test_columns_are_those_of_kubectl(applied: Any, capfd: pytest.CaptureFixture[str], kind: str, plural: str) -> None:
    crd = yaml.safe_load((CRDS / f"{plural}.serving.weft.dev.yaml").read_text())
    printed = [(one["name"].upper(), one.get("priority", 0)) for one in columns_in(crd)]
    for form, limit in (("table", 0), ("wide", 1)):
        headers = run(capfd, "get", plural, "-A", "-o", form)[1].splitlines()[0].split()
        assert headers == ["NAMESPACE", "NAME", *(name for name, priority in printed if priority <= limit)]


def columns_in(crd: dict[str, Any]) -> list[dict[str, Any]]:
    return crd["spec"]["versions"][0]["additionalPrinterColumns"]


def test_pools_are_listed_with_desired_and_ready_runners(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in run(capfd, "get", "spool")[1].splitlines()]
    assert lines[0] == ["NAME", "MODEL", "DESIRED", "READY", "ADAPTERS", "AVAILABLE", "REASON", "AGE"]
    assert lines[1][:7] == ["base", "file:model", *["<none>"] * 5]
    facts = {"eosTokenIds": [7, 9], "generationDefaults": {"temperature": 0.7, "topK": 20}}
    facts["chatTemplate"] = {"from": "Base"}
    status = {"desiredReplicas": 5, "readyReplicas": 1, "adapters": {"ready": 2, "total": 3}, **facts}
    applied.set_status("ServingPool", "default", "base", status)
    assert run(capfd, "get", "spool")[1].splitlines()[1].split()[1:5] == ["file:model", "5", "1", "2"]
    described = run(capfd, "describe", "spool", "base")[1]
    assert "1 ready of 5 desired" in described
    assert (
        "Ends with:   token 7 or 9\nDefaults:    temperature 0.7, topK 20\nTemplate:    the base model's\n" in described
    )


def test_json_and_yaml_are_the_whole_object(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(run(capfd, "get", "lora", "upper", "-n", "acme", "-o", "json")[1])
    assert whole["status"]["digest"] == DIGEST
    assert yaml.safe_load(run(capfd, "get", "lora", "upper", "-n", "acme", "-o", "yaml")[1]) == whole
    listed = json.loads(run(capfd, "get", "lora", "-A", "-o", "json")[1])
    assert [item["metadata"]["name"] for item in listed["items"]] == ["upper", "lower"]


def test_an_empty_namespace_says_where_to_look(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "get", "lora")
    assert (code, out) == (0, "")
    assert err == "No loraadapters found in namespace default (2 in other namespaces: -A shows them).\n"


def test_describe_tells_conditions_advice_and_residency(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "describe", "lora", "upper", "-n", "acme")
    assert code == 0
    assert "01234567   device   2" in out
    assert "Ends with:   token 151645, and the base's\n" in out
    _, out, _ = run(capfd, "describe", "lora", "lower", "-n", "globex")
    assert "rank 128, the pool takes 64" in out
    assert "RankTooLarge: train with a smaller rank" in out
    assert "no runner has it in memory" in out
    _, out, _ = run(capfd, "describe", "spool", "base")
    assert "01234567" in out
    _, out, _ = run(capfd, "describe", "runner", "0123")
    assert "3 used of 64" in out
    assert "best at 6 sequences, 2.5 ms a token (alone 1.25 ms); prompts at 12,346 tokens/s" in out


def test_runners_are_listed(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in run(capfd, "get", "runners", "-o", "wide")[1].splitlines()]
    assert lines == [
        ["RUNNER", "POOL", "READY", "SEQUENCES", "PAGES", "ADAPTERS", "ROLE", "ADDRESS"],
        ["01234567", "default/base", "True", "2/8", "3/64", "1", "mixed", "127.0.0.1:7000"],
    ]
    assert json.loads(run(capfd, "get", "runners", "-o", "json")[1])[0]["usedPages"] == 3


def test_many_adapters_are_applied_and_deleted_in_a_few_requests_and_writes(
    controller: Any, manifests: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = manifests / "many.yaml"
    many.write_text("---".join(MANY.format(number=number) for number in range(1000)))
    asked: list[str] = []
    answer, write = ControllerClient._answer, persistence.write_atomically  # pyright: ignore[reportPrivateUsage]

    def counting(self: ControllerClient, method: str, path: str, *more: Any, **options: Any) -> Any:
        asked.append(path)
        return answer(self, method, path, *more, **options)

    def written(path: Path, content: bytes) -> None:
        asked.append("objects.json")
        write(path, content)

    monkeypatch.setattr(ControllerClient, "_answer", counting)
    monkeypatch.setattr(persistence, "write_atomically", written)
    monkeypatch.setattr(persistence, "GATHER_S", 3600.0)  # what nobody waits for is not counted
    assert len(run(capfd, "apply", "-f", str(many))[1].splitlines()) == 1000
    assert Counter(asked) == {"/v1/apply": 4, "objects.json": 4}
    asked.clear()
    assert len(run(capfd, "delete", "-f", str(many))[1].splitlines()) == 1000
    assert Counter(asked) == {"/v1/delete": 4, "objects.json": 4}
    assert controller.store.objects() == []


HOSTILE = "\x1b]0;owned\x07 \x9b31m \u202e \r"


@pytest.fixture
def hostile(applied: Any) -> Any:
    condition = {**REFUSED["conditions"][0], "message": HOSTILE + "\nsecond"}
    status = {"observedGeneration": 1, "modelName": HOSTILE, "digest": HOSTILE, "conditions": [condition]}
    applied.set_status("LoRAAdapter", "acme", "upper", status)
    applied.do(lambda: applied.log.write(HOSTILE.encode() + b"\n"))
    applied.stack["components"]["depot"]["detail"] = HOSTILE
    return applied


@pytest.mark.parametrize(
    "argv",
    [
        ["describe", "lora", "upper", "-n", "acme"],
        ["get", "lora", "-A", "-o", "wide"],
        ["get", "lora", "upper", "-n", "acme", "-o", "yaml"],
        ["get", "lora", "upper", "-n", "acme", "-o", "json"],
        ["logs", "depot"],
        ["status"],
        ["describe", "lora", HOSTILE],
        ["delete", "lora", HOSTILE],
        ["get", "lora", HOSTILE],
        ["get", "runners", HOSTILE],
        ["key", "revoke", HOSTILE],
    ],
)
def test_no_escape_code_of_a_tenant_reaches_the_terminal(
    hostile: Any, capfd: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    _, out, err = run(capfd, *argv)
    assert "owned" in out + err
    assert all(char.isprintable() or char == "\n" for char in out + err)


@pytest.mark.parametrize(("form", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_what_is_escaped_for_the_terminal_stays_the_value(
    hostile: Any, capfd: pytest.CaptureFixture[str], form: str, parse: Any
) -> None:
    found = parse(run(capfd, "get", "lora", "upper", "-n", "acme", "-o", form)[1])
    assert found["status"]["modelName"] == HOSTILE


@pytest.mark.parametrize("name", ["a/b", "..", "x?y=z#q", "50%", "\udcff", "\u00e9 t\u00e9"])
def test_a_name_may_be_typed_in_any_way(applied: Any, capfd: pytest.CaptureFixture[str], name: str) -> None:
    shown = name.replace("\udcff", "\ufffd")  # half a character, as the shell hands it over, is in no object's name
    for command in ("describe", "delete"):
        code, out, err = run(capfd, command, "lora", name, "-n", "acme")
        assert (code, out) == (1, "")
        assert f"there is no LoRAAdapter acme/{shown}" in err
        assert "-n names another namespace" in err
    code, _, err = run(capfd, "logs", name)
    assert code == 1
    assert f"unknown component {shown!r}" in err
    assert "-n names" not in err


def test_delete_by_name_and_by_manifest(applied: Any, manifests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "delete", "lora", "upper", "-n", "acme")[1] == "loraadapter/upper deleted\n"
    code, out, err = run(capfd, "delete", "-f", str(manifests))
    assert code == 1
    assert out.splitlines() == ["loraadapter/lower deleted", "servingpool/base deleted"]
    assert "there is no LoRAAdapter acme/upper" in err
    assert "-n names" not in err  # a manifest names its namespace itself
    assert applied.store.objects() == []


def test_keys_are_made_listed_and_revoked(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "key", "create", "-n", "acme", "--note", "ci")
    assert (code, out) == (0, "weft-k1-secret\n")
    assert "shown this once" in err
    assert run(capfd, "key", "list")[1].splitlines()[1].split()[:3] == ["k1", "acme", "Active"]
    assert run(capfd, "key", "revoke", "k1")[1] == "key/k1 revoked\n"
    assert run(capfd, "keys", "list")[1].splitlines()[1].split()[2] == "Revoked"
    code, _, err = run(capfd, "key", "revoke", "nope")
    assert code == 1
    assert "there is no key nope" in err
    code, _, err = run(capfd, "key", "create", "-n", "Bad Name")
    assert (code, err) == (2, "weft: namespace 'Bad Name' is not a DNS label\n")


def test_a_key_is_made_with_its_bounds_and_as_a_secret(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    bounds = ("--scope", "read-only", "--model", "acme/*", "--expires", "30d")
    began = time.time()
    code, out, _ = run(capfd, "key", "create", "-n", "acme", *bounds, "-o", "secret")
    expiries = began + 30 * 86_400 - 1, time.time() + 30 * 86_400
    secret = yaml.safe_load(out)
    assert (code, secret["kind"], secret["metadata"]["namespace"]) == (0, "Secret", "acme")
    assert secret["stringData"] == {"key": "weft-k1-secret"}
    row = run(capfd, "key", "list")[1].splitlines()[1].split()
    assert row[2:5] == ["Active", "read-only", "acme/*"]
    assert expiries[0] <= datetime.fromisoformat(row[6]).timestamp() <= expiries[1], "in whole seconds"
    for wrong in (["--scope", "all"], ["--expires", "soon"], ["-o", "json"]):
        assert run(capfd, "key", "create", "-n", "acme", *wrong)[0] == 2


def test_limits_are_set_listed_and_deleted(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    values = ("requests-per-minute=60", "concurrent=4")
    assert run(capfd, "limit", "set", "-n", "acme", "--model", "acme/*", *values)[0] == 0
    assert run(capfd, "limit", "set", "--key", "k1", "tokens-per-minute=9")[0] == 0
    rows = [line.split() for line in run(capfd, "limits", "list")[1].splitlines()[1:]]
    assert rows == [["namespace/acme", "acme/*", "60", "-", "4", "-"], ["key/k1", "*", "-", "9", "-", "-"]]
    code, out, _ = run(capfd, "limit", "delete", "--key", "k1")
    assert (code, out) == (0, "limits of key/k1 deleted\n")
    for wrong, said in (
        ("-n acme", "there are: requests-per-minute=NUMBER, tokens-per-minute=NUMBER, concurrent=NUMBER"),
        ("-n acme requests=5", "'requests=5': there is no limit 'requests'"),
        ("-n acme concurrent=0", "'concurrent=0': write concurrent=NUMBER, of 1 or more"),
        ("-n acme concurrent 4", "'concurrent': write concurrent=NUMBER, of 1 or more"),
        (f"-n acme tokens-per-day={1 << 51}", "write tokens-per-day=NUMBER"),
        ("-n acme concurrent=1 concurrent=2", "concurrent is there twice"),
        ("concurrent=1", "whose limits?"),
        ("-n a --key b concurrent=1", "whose limits?"),
    ):
        code, _, err = run(capfd, "limit", "set", *wrong.split())
        assert (code, said in err) == (2, True), err


def test_usage_is_summed_by_columns(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    lines = run(capfd, "usage", "--since", "2024-10-04")[1].splitlines()
    assert lines[0].split() == ["NAMESPACE", "MODEL", "REQUESTS", "PROMPT", "TOKENS", "COMPLETION", "TOKENS"]
    assert lines[1].split() == ["acme", "acme/m", "2", "40", "6"]
    by_day = run(capfd, "usage", "--since", "2024-10-05", "--by", "day,model", "--csv")[1]
    assert by_day == (
        "day,model,requests,prompt_tokens,completion_tokens\n"
        "2024-10-05,acme/m,1,20,3\n"
        '2024-10-05,"b/m, the second",1,20,3\n'
    )
    by_key = run(capfd, "usage", "--since", "2024-10-04", "--by", "key", "--csv")[1].splitlines()
    assert by_key == ["key,requests,prompt_tokens,completion_tokens", "k1,3,60,9"]
    for wrong in (["--by", "adapter"], ["--since", "soon"]):
        assert run(capfd, "usage", *wrong)[0] == 2


def test_status_fails_when_a_component_is_not_ready(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "status")
    assert code == 0
    assert "http://127.0.0.1:8080/v1" in out
    controller.stack["components"]["depot"]["phase"] = "Backoff"
    assert run(capfd, "status")[0] == 1


def test_logs_are_printed_and_components_named(controller: Any, capfd: pytest.CaptureFixture[str]) -> None:
    controller.do(lambda: controller.log.write(b"one\ntwo\n"))
    assert run(capfd, "logs", "depot", "--tail", "1")[1] == "two\n"
    assert run(capfd, "logs", "depot", "--tail=0")[1] == ""
    controller.do(lambda: controller.log.write(b"line\n" * 12_000))
    assert len(run(capfd, "logs", "depot", "--tail", "12001")[1].splitlines()) == 12_001
    assert run(capfd, "logs", "depot", "--tail", "-1")[1].splitlines()[:2] == ["one", "two"]
    assert len(run(capfd, "logs", "depot")[1].splitlines()) == 100
    assert run(capfd, "logs", "depot", "--tail", "-2")[0] == 2
    assert run(capfd, "logs")[1].split() == ["controller", "depot"]
    code, _, err = run(capfd, "logs", "nope")
    assert code == 1
    assert "expected: depot" in err


def test_a_supervisor_that_is_gone_is_named(applied: Any, capfd: pytest.CaptureFixture[str]) -> None:
    applied.stack["supervisor"] = "127.0.0.1:1"
    code, _, err = run(capfd, "get", "runners")
    assert code == 1
    assert "the supervisor at 127.0.0.1:1 does not answer" in err


def test_watch_prints_each_change_below_the_list(applied: Any) -> None:
    argv = (sys.executable, "-m", "weft_cli", "get", "lora", "-A", "-w")
    with started(*argv, stdout=subprocess.PIPE, text=True) as watching:
        first = [watching.stdout.readline() for _ in range(3)]
        applied.set_status("LoRAAdapter", "globex", "lower", READY)
        later = watching.stdout.readline()
    assert first[0].startswith("NAMESPACE")
    assert later.split()[:6] == ["globex", "lower", "base", "acme/upper", "True", "Published"]
    assert later.index("True") == first[0].index("READY")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["get", "pods"], "there is no resource 'pods'"),
        (["get", "lora", "-o", "xml"], "there is no output 'xml'"),
        (["get", "runners", "-w"], "cannot be watched"),
        (["delete"], "what to delete?"),
        (["delete", "lora"], "which lora?"),
        (["delete", "runners", "x"], "change spec.replicas"),
        (["apply"], "nothing to read"),
        (["apply", "-f", "/nowhere.yaml"], "/nowhere.yaml"),
        (["apply", "-f", "/nowhere.yaml"], "nothing was applied"),
        (["delete", "-f", "/nowhere.yaml"], "nothing was deleted"),
        (["up", "--log-level", "foo"], "--log-level"),
        (["up", "--demo", "-f", "x"], "--demo brings its own manifests"),
        (["up", "--file-root", "/nowhere"], "is not a folder"),
        (["up", "--port", "99999"], "--port"),
        (["up", "--allowed-hosts", "gpu-box,http://x"], "--allowed-hosts: expected NAME"),
        (["up", "--auth", "--allowed-hosts", "gpu-box"], "no effect with --auth"),
        (["up", "--auth", "--no-prefix-sharing"], "no effect with --auth"),
        (["up", "--cors-origin", "https://a/"], "--cors-origin: expected SCHEME://HOST[:PORT] or *, got 'https://a/'"),
        (["up", "--cors-origin", "*"], "or ask for keys with --auth"),
        (["serve", "x", "--cors-origin", "*"], "or ask for keys with --auth"),
        (["predictor"], "weft predictor train DATA"),
        (["families", "-o", "xml"], "expected -o wide, got xml"),
        (["nope"], "No such command"),
        (["get"], "Missing argument"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_named_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    more = [] if argv[0] in ("predictor", "families", "nope") else ["--data-dir", str(tmp_path)]
    code, out, err = run(capfd, *argv, *more)
    assert code == 2
    assert says in err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [["up"], ["get", "lora"], ["status"], ["logs"], ["apply", "-f", "x"]])
def test_a_data_directory_that_is_a_file_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    path = tmp_path / "file"
    path.touch()
    code, _, err = run(capfd, *argv, "--data-dir", str(path))
    assert code == 2
    assert f"the data directory {path} is not a folder" in err


def test_without_a_controller_a_command_says_how_to_start_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capfd, "get", "lora", "--data-dir", str(tmp_path))
    assert code == 1
    assert f"no weft is running in {tmp_path}" in err
    assert "weft up" in err


def test_logs_of_a_stack_that_ended_can_still_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").write_text("one\ntwo\n")
    (tmp_path / "logs" / "gateway.log.1").write_text("zero\n")
    for tail, lines in (("1", "two\n"), ("3", "zero\none\ntwo\n"), ("-1", "zero\none\ntwo\n"), ("0", "")):
        code, out, _ = run(capfd, "logs", "gateway", "--tail", tail, "--data-dir", str(tmp_path))
        assert (code, out) == (0, lines)


def test_help_teaches_by_example_and_needs_no_heavy_import() -> None:
    code = "import sys; from weft_cli.main import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run(tied(sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert "weft up --demo" in done.stdout
    loaded = done.stderr
    for heavy in ("'torch'", "'grpc'", "'starlette'", "'uvicorn'", "'pydantic'", "'yaml'", "'httpx2'"):
        assert heavy not in loaded


@pytest.mark.parametrize("words", [("bench", "cpu", "--help"), ("conformance", "http://127.0.0.1:1")])
def test_a_distribution_that_is_not_installed_is_named(words: tuple[str, ...]) -> None:
    absent = "import sys; sys.modules.update(weft_bench=None, weft_conformance=None); from weft_cli.main import main; "
    code = f"{absent} sys.exit(main({list(words)}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pip install 'weft[{words[0]}]'" in done.stderr


def test_no_color_means_no_escape_codes(applied: Any) -> None:
    commands = (["--help"], ["get", "lora", "-A"], ["get", "nope"], ["nope"])
    code = f"from weft_cli.main import main; print([main(argv) for argv in {commands!r}])"
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""}
    done = subprocess.run(tied(sys.executable, "-c", code), capture_output=True, check=True, env=environment)
    assert done.stdout.endswith(b"[0, 0, 2, 2]\n")
    assert b"\x1b[" not in done.stdout + done.stderr

"""What the process is started with: flags, and the file of runner defaults."""

import re
from pathlib import Path

import pytest

from weft_operator.core.state import SharedFolders
from weft_operator.kubernetes import BadRunnerDefaults, Settings, read_runner_defaults

NEEDED = ["--namespace", "weft-system", "--pool-namespaces", "a,b, a", "--runner-defaults", "runner-defaults.yaml"]


def test_the_namespaces_of_pools_are_a_list_of_each_once() -> None:
    assert Settings.parse(NEEDED).namespaces == ("a", "b")


def test_every_wrong_flag_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Settings.parse([*NEEDED, "--scheduler", "nowhere", "--depot", "ftp://x", "--poll-seconds", "-1"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(flag in told for flag in ("--scheduler", "--depot", "--poll-seconds"))


def test_a_webhook_needs_certificates(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Settings.parse([*NEEDED, "--webhook", "0.0.0.0:9443"])
    assert "--webhook-tls-dir" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["", "a,,b", "a" * 64])
def test_what_is_no_list_of_namespaces_is_refused(names: str) -> None:
    with pytest.raises(SystemExit):
        Settings.parse(["--namespace", "n", "--runner-defaults", "s", "--pool-namespaces", names])


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("--model-cache-paths", ["", "/", "srv", "/srv/", "/srv/../etc", "/srv/./a", "//srv", "/srv,", "/srv, /a"]),
        ("--model-cache-claims", ["", "cache", "/cache", "a/", "a/b/c", "A/cache", "a/cache,", "a/cache, b/cache"]),
    ],
)
def test_folders_of_pools_are_exact_and_nothing_is_one_by_default(
    flag: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert Settings.parse(NEEDED).shared_folders == SharedFolders()
    given = Settings.parse([*NEEDED, "--model-cache-paths", "/srv/a,/mnt", "--model-cache-claims", "ml/b.c,a/c"])
    assert given.shared_folders == SharedFolders(frozenset({"/srv/a", "/mnt"}), frozenset({"ml/b.c", "a/c"}))
    for value in wrong:
        with pytest.raises(SystemExit):
            Settings.parse([*NEEDED, f"{flag}={value}"])
        assert re.search(f"(?s){flag}.*expected", capsys.readouterr().err), value


def test_a_flag_may_be_said_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_OPERATOR__POLL_SECONDS", "7")
    assert Settings.parse(NEEDED).poll_seconds == 7


def defaults(folder: Path, text: str) -> Path:
    path = folder / "runner-defaults.yaml"
    path.write_text(text)
    return path


def test_a_site_is_read_with_the_names_of_kubernetes(tmp_path: Path) -> None:
    read = read_runner_defaults(
        defaults(
            tmp_path,
            """
            image: registry/weft-runner@sha256:0
            imagePullPolicy: Never
            imagePullSecrets: [pull]
            supervisor: weft-supervisor:7420
            depot: https://weft-depot:8084
            tlsSecret: weft-runner-tls
            env: [{name: A, value: b}]
            volumeMounts: [{name: usr, mountPath: /usr, readOnly: true}]
            securityContexts: {pod: {runAsUser: 1000}, container: {privileged: false}}
            """,
        )
    )
    assert (read.image_pull_policy, list(read.image_pull_secrets), read.tls_secret) == (
        "Never",
        ["pull"],
        "weft-runner-tls",
    )
    assert read.volume_mounts == [{"name": "usr", "mountPath": "/usr", "readOnly": True}]
    assert read.security_contexts.pod == {"runAsUser": 1000}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image: x", "supervisor"),
        ("image: [x]\nsupervisor: s\ndepot: d", "image"),
        ("image: x\nsupervisor: s\ndepot: d\nhostNetwork: true", "hostNetwork"),
        ("- image", "not a mapping"),
        ("image: {", "runner-defaults.yaml"),
    ],
)
def test_a_site_that_is_wrong_stops_the_start_and_says_where(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BadRunnerDefaults, match=told):
        read_runner_defaults(defaults(tmp_path, text))


def test_a_site_that_is_not_there_is_reported_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(BadRunnerDefaults, match="absent"):
        read_runner_defaults(tmp_path / "absent")

"""What the documents promise is there: links, files, and the commands that show a feature."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.api.reasons import ADVICE

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("charts/**/*.md")]
)
FEATURES = (ROOT / "docs" / "features.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PROCESSES = (
    "weft_gateway", "weft_scheduler", "weft_predictor", "weft_supervisor", "weft_depot", "weft_runner",
    "weft_operator.kubernetes",
)  # fmt: skip
OF_OTHERS = {  # flags of kubectl, helm and podman
    "all", "cascade", "create-namespace", "for", "force", "raw", "replicas", "set", "take-ownership", "timeout", "type",
    "values", "wait",
}  # fmt: skip
NOT_OURS = ("docs/benchmarks", "docs/plans", "examples")  # flags as they were then; of train.py


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`pytest (tests/[^`]+)`", FEATURES))))
def test_every_command_of_the_features_page_selects_a_test(command: str) -> None:
    path, _, selection = command.partition(" -k ")
    assert (ROOT / path).exists(), path
    if selection:
        listed = subprocess.run(
            [sys.executable, "-m", "pytest", path, "-k", selection, "--collect-only", "-q"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert listed.returncode == 0, listed.stdout


def test_every_reason_is_in_the_reference_and_nothing_else_is() -> None:
    chapter = REFERENCE.partition("\n## Reasons\n")[2].partition("\n## ")[0].partition("**Events**")[0]
    rows = re.findall(r"(?m)^\| (`[^|]*) \|", chapter)
    (true,) = re.findall(r"\*\*Of True conditions\*\*: (.*)", chapter)
    listed = [name for row in [*rows, true] for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(ADVICE)


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """What the processes and the `weft` command take."""
    commands = [[sys.executable, "-m", name, "--help"] for name in PROCESSES]
    weft = [
        [],
        ["up"],
        ["apply"],
        ["get"],
        ["describe"],
        ["delete"],
        ["logs"],
        ["status"],
        ["key", "create"],
        ["chat"],
        ["top"],
        ["bench"],
        ["bench", "cpu"],
        ["bench", "peers"],
        ["bench", "path"],
    ]
    commands += [[sys.executable, "-m", "weft_cli", *words, "--help"] for words in weft]
    told = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    return set(re.findall(r"--([a-z][a-z0-9-]+)", "".join(told)))


def test_every_flag_that_the_documents_name_exists(flags: set[str]) -> None:
    """In what is to be typed: code spans and blocks."""
    unknown: dict[str, set[str]] = {}
    for page in PAGES:
        if str(page.relative_to(ROOT)).startswith(NOT_OURS):
            continue
        code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", code))
        if missing := named - flags - OF_OTHERS:
            unknown[page.name] = missing
    assert unknown == {}


def test_files_that_the_features_page_names_exist() -> None:
    names = set(re.findall(r"`((?:weft_\w+|core|model|memory|services|weft|kernels)/[\w/.]*)`", FEATURES))
    roots = [ROOT, *ROOT.glob("services/*"), *ROOT.glob("services/*/weft_*"), ROOT / "operator", ROOT / "kernels"]
    assert {name for name in names if not any((root / name).exists() for root in roots)} == set()

"""What the documents promise is there: links, files, and the commands that show a feature."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FEATURES = (ROOT / "docs" / "features.md").read_text()


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


def test_files_that_the_features_page_names_exist() -> None:
    names = set(re.findall(r"`((?:weft_\w+|core|model|memory|services|weft|kernels)/[\w/.]*)`", FEATURES))
    roots = [ROOT, *ROOT.glob("services/*"), *ROOT.glob("services/*/weft_*"), ROOT / "operator", ROOT / "kernels"]
    assert {name for name in names if not any((root / name).exists() for root in roots)} == set()

"""Commands and snippets of docs/tutorials as they stand there, on one stack with keys; their manifests are valid."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.manifests import load_text
from harness.waiting import PATIENCE_S
from weft_stage.stack import Stack, quickstart

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"(<!-- not run: .*? -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(quickstart(), tmp_path_factory.mktemp("w"), "--auth") as made:
        made.key = made.create_key("acme")
        made.wait_for_models()
        yield made


def blocks(page: str, language: str, *, all_of_them: bool = False) -> list[str]:
    """What the page says to type."""
    found = BLOCK.findall((PAGES / page).read_text())
    return [code for skipped, kind, code in found if kind == language and (all_of_them or not skipped)]


def typed(stack: Stack, folder: Path, page: str) -> str:
    """What the page's commands print, then its Python, in a folder that looks like a checkout."""
    for name in ("examples", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    snippets = "".join(blocks(page, "python"))
    (folder / "snippets.py").write_text(snippets.replace(":8080", f":{stack.port}"))
    lines = ["set -eo pipefail", *blocks(page, "sh"), "python snippets.py"]
    script = "\n".join(lines).replace(":8080", f":{stack.port}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "WEFT_DATA_DIR": str(stack.data_dir), "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=3 * PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl, which the page types: apt-get install curl")
def test_a_tenant_trains_publishes_and_calls_an_adapter(locked: Stack, tmp_path: Path) -> None:
    printed = typed(locked, tmp_path, "tenant.md")
    assert printed.count('"text":"weft serves adapters"') == 2, printed


def test_a_client_calls_models_and_meets_errors(locked: Stack, tmp_path: Path) -> None:
    printed = typed(locked, tmp_path, "client.md").splitlines()[-6:]
    assert printed[:3] == ["HELLO THERE", "HELLO THERE", "404 model_not_found"]
    assert re.fullmatch(r"(\d+|None) sha256:[0-9a-f]{64}", printed[3])  # None: the limit is not at the gateway yet
    assert printed[4] in ("yes", "no")
    assert printed[5].startswith("weather {'city': ")


@pytest.mark.parametrize("page", ["tenant.md", "platform.md"])
def test_manifests_of_the_tutorials_are_valid(page: str) -> None:
    ours = [code for code in blocks(page, "yaml", all_of_them=True) if "serving.weft.dev" in code]
    assert ours
    for code in ours:
        load_text(code, name=page)


def test_values_of_the_platform_tutorial_are_values_of_the_chart() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "weft" / "values.yaml").read_text())
    (values,) = [yaml.safe_load(code) for code in blocks("platform.md", "yaml", all_of_them=True) if "depot:" in code]
    assert not list(unknown(values, chart))


def unknown(values: dict[str, object], chart: object, at: str = "") -> Iterator[str]:
    for key, value in values.items():
        if not isinstance(chart, dict) or key not in chart:
            yield f"{at}{key}"
        elif isinstance(value, dict) and chart[key]:
            yield from unknown(value, chart[key], f"{at}{key}.")

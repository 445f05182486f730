"""`python .ci/release_notes.py VERSION`: a version's section of CHANGELOG.md, once all files are of that version."""

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## \[?(?P<version>[^\]\s]+)\]?(?: - .*)?$", re.MULTILINE)


class NotReady(Exception):
    """Something is not of the version that is to be released. The message names it."""


def notes(changelog: str, version: str) -> str:
    """The section of that version, without its heading. Raises NotReady where there is none, or nothing in it."""
    headings = list(HEADING.finditer(changelog))
    for heading, end in zip(headings, [*(one.start() for one in headings[1:]), len(changelog)], strict=True):
        if heading["version"] == version and (text := changelog[heading.end() : end].strip()):
            return text + "\n"
    raise NotReady(f"CHANGELOG.md has nothing for {version}")


def check_versions(version: str, projects: Mapping[str, str], chart: str) -> None:
    """Raises NotReady where a distribution (by its file) or the chart is of another version."""
    found = {f"{path} version": tomllib.loads(text)["project"]["version"] for path, text in projects.items()}
    for name in ("version", "appVersion"):
        match = re.search(rf'^{name}: "?([^"\s]+)"?$', chart, re.MULTILINE)
        found[f"charts/weft/Chart.yaml {name}"] = match[1] if match else "none"
    if wrong := [f"{name} is {other}" for name, other in found.items() if other != version]:
        raise NotReady(f"to release {version}: {', '.join(wrong)}")


def projects() -> dict[str, str]:
    """What says the version of each distribution, by its path."""
    paths = (ROOT / "pyproject.toml", *sorted(ROOT.glob("*/pyproject.toml")))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def main(version: str) -> int:
    chart = ROOT / "charts" / "weft" / "Chart.yaml"
    try:
        check_versions(version, projects(), chart.read_text())
        sys.stdout.write(notes((ROOT / "CHANGELOG.md").read_text(), version))
    except NotReady as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

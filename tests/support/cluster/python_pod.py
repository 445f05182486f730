"""How a pod of a test cluster runs this checkout's Python: the machine's own files, mounted read-only."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ENVIRONMENT = (("HOME", "/tmp"), ("PYTHONDONTWRITEBYTECODE", "1"))  # as an image would set them
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")


@dataclass(frozen=True, slots=True)
class PythonVolumes:
    """Ready to be put into a pod template, or into a chart's `extraVolumes` and `extraVolumeMounts`.

    They are hostPath volumes: a namespace that enforces a Pod Security level of `baseline` or above refuses them.
    """

    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    env: list[dict[str, str]]
    python: str


def python_volumes() -> PythonVolumes:
    """System libraries, the Python installation, the virtual environment and the checkout, where they lie here."""
    places = _outermost([Path(sys.base_prefix), Path(sys.prefix), ROOT])
    paths = {path: Path(path).resolve() for path in SYSTEM if Path(path).exists()}
    paths |= {str(place): place for place in places}
    names = {path: f"host{re.sub('[^a-z0-9]+', '-', path.lower())}"[:63].rstrip("-") for path in paths}
    search = f"{sys.prefix}/bin:/usr/bin:/bin"
    return PythonVolumes(
        volumes=[
            {"name": names[at], "hostPath": {"path": str(path), "type": "Directory"}} for at, path in paths.items()
        ],
        mounts=[{"name": names[at], "mountPath": at, "readOnly": True} for at in paths],
        env=[{"name": name, "value": value} for name, value in (*ENVIRONMENT, ("PATH", search))],
        python=f"{sys.prefix}/bin/python",
    )


def _outermost(places: list[Path]) -> list[Path]:
    """Those that lie in no other one, nor in the system's folders."""
    known = [Path(path) for path in SYSTEM]
    unique = sorted(set(places), key=lambda place: len(place.parts))
    for place in unique:
        if not any(place.is_relative_to(outer) for outer in known):
            known.append(place)
    return known[len(SYSTEM) :]

"""Volumes by which a pod of a test cluster runs this checkout's Python: the machine's own files, mounted read-only.

Images carry the CPU kernels ready built; here the pods find those that this machine has built, in a cache of their own.
"""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_devcluster.tools import cache
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import load

ROOT = Path(__file__).parents[2]
CACHE = "/opt/weft-cache"  # in a pod
ENVIRONMENT = (  # as an image would set them
    ("HOME", "/tmp"),
    ("HF_HOME", "/tmp/huggingface"),
    ("XDG_CACHE_HOME", CACHE),
    ("PYTHONDONTWRITEBYTECODE", "1"),
)
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")


@dataclass(frozen=True, slots=True)
class PythonVolumes:
    """The volumes, ready to be put into a pod template, or into the overlay of a chart's component (`pod`).

    They are hostPath volumes: a namespace that enforces a Pod Security level of `baseline` or above refuses them.
    """

    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    env: list[dict[str, str]]
    python: str


def python_volumes() -> PythonVolumes:
    """Gather system libraries, Python, the virtual environment and the checkout, if they lie here."""
    places = _outermost([Path(sys.base_prefix), Path(sys.prefix), ROOT])
    paths = {path: Path(path).resolve() for path in SYSTEM if Path(path).exists()}
    paths |= {str(place): place for place in places} | {CACHE: built_kernels()}
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


def built_kernels() -> Path:
    """Make a cache folder that any user of a pod can read, with this checkout's kernels (empty: none can be built)."""
    root = cache() / "pod-cache"
    entries = root / "weft" / "kernels"
    entries.mkdir(parents=True, exist_ok=True)
    try:
        built = load().path.parent
    except NativeUnavailable:
        return root
    if not (entries / built.name).exists():
        shutil.copytree(built, entries / built.name)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)
    return root


def _outermost(places: list[Path]) -> list[Path]:
    """Keep the places that lie in no other one, nor in the system's folders."""
    known = [Path(path) for path in SYSTEM]
    unique = sorted(set(places), key=lambda place: len(place.parts))
    for place in unique:
        if not any(place.is_relative_to(outer) for outer in known):
            known.append(place)
    return known[len(SYSTEM) :]

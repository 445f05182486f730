"""Hatch's hook for the wheel: the CPU kernels go with it, compiled here, by a compiler that is fetched where none is.

Such a wheel is for one platform and any Python (`py3-none-linux_x86_64`: the library knows no Python ABI). Where no
compiler can be had it is a pure one, and runners build the library when they first start. An editable
installation never carries it. `WEFT_WHEEL_KERNELS` = auto (default), require (fail without them), or skip.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from weft_kernels.cpu.build import Built

VARIABLE = "WEFT_WHEEL_KERNELS"
CHOICES = ("auto", "require", "skip")
PLACE = "weft_kernels/cpu"


class NativeKernels(BuildHookInterface[Any]):
    """Builds in a temporary folder and names the files to hatchling; the source tree stays as it is."""

    PLUGIN_NAME = "custom"
    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get(VARIABLE, "auto")
        if wanted not in CHOICES:
            raise ValueError(f"{VARIABLE}={wanted}: choose one of {', '.join(CHOICES)}")
        if version == "editable" or wanted == "skip":
            return
        if (library := self._build(required=wanted == "require")) is None:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        for file in (library, library.with_suffix(".sha256")):
            build_data["force_include"][str(file)] = f"{PLACE}/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def _build(self, *, required: bool) -> Path | None:
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from weft_kernels.cpu.errors import NativeUnavailable

        self._folder = Path(tempfile.mkdtemp(prefix="weft-kernels-"))
        try:
            built = _compiled(self._folder)
        except NativeUnavailable as error:
            if required:
                raise
            self.app.display_warning(f"A pure wheel, without the CPU kernels: {error.reason}")
            return None
        left_out = f"; without {', '.join(built.left_out)}" if built.left_out else ""
        self.app.display_info(f"CPU kernels built in {built.seconds} s{left_out}")
        return built.library


def _compiled(folder: Path) -> "Built":
    from weft_kernels.cpu.build import build_library
    from weft_kernels.cpu.compiler import find_or_fetch
    from weft_kernels.cpu.sources import SOURCES

    return build_library(SOURCES, find_or_fetch(), folder)

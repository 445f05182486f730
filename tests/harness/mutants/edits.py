"""A break where no operator leads: one text of any file of the checkout, and what stands there instead.

Its tests run in a copy of the tracked files, whose packages come before the installed ones, also their data: nothing
is written in the checkout.
"""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.mutants.hook import ROOT


@dataclass(frozen=True, slots=True)
class Edit:
    """The text, which stands once in the file as it is now, and the other one."""

    file: str
    text: str
    instead: str
    function: str = ""  # as of a mutant: the file need not be Python

    @property
    def name(self) -> str:
        return f"{self.file}, instead `{self.instead}`"


class Copy:
    """The tracked files as they are now, in `folder`."""

    _edited: Edit | None

    def __init__(self, folder: Path) -> None:
        self.folder, self._edited = folder, None
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for file in filter(lambda file: (ROOT / file).is_file() or (ROOT / file).is_symlink(), listed.split("\0")[:-1]):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            # no new link: a test may write into what it takes for the checkout
            shutil.copy(ROOT / file, folder / file, follow_symlinks=False)
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def environment(self) -> Mapping[str, str]:
        """What leads Python to the copy's packages."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())
        packages = [str(self.folder / path) for path in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
        return {"PYTHONPATH": os.pathsep.join((str(self.folder / "tests"), *packages))}

    def put(self, edit: Edit | None) -> None:
        """Have this edit and no other one."""
        if self._edited:
            (self.folder / self._edited.file).write_text((ROOT / self._edited.file).read_text())
        if edit:
            (self.folder / edit.file).write_text((ROOT / edit.file).read_text().replace(edit.text, edit.instead))
        self._edited = edit

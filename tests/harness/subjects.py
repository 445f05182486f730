"""Subjects of commits, for `make check`: `python -m harness.subjects`.

A subject has at most 72 characters, which is what lists of commits show, and a body says why. Commits made before
SINCE are as they are.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_SUBJECT_CHARS = 72
SINCE = "2026-11-27T14:30:00+00:00"
_FIELDS = "%h%x1f%s%x1f%b%x1e"


def main() -> int:
    """Look at the commits since SINCE. Returns 0; 1 where one is to be reworded. An archive has no history: 0."""
    log = subprocess.run(
        ["git", "-C", ROOT, "log", "--no-merges", f"--since={SINCE}", f"--format={_FIELDS}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if log.returncode:
        print(f"subjects: not looked at: {log.stderr.strip()}")
        return 0
    records = [record.strip("\n").split("\x1f") for record in log.stdout.split("\x1e") if record.strip()]
    wrong = list(faults((commit, subject, body) for commit, subject, body in records))
    print("\n".join(wrong) or f"subjects of {len(records)} commits: all right")
    return 1 if wrong else 0


def faults(commits: Iterable[tuple[str, str, str]]) -> Iterable[str]:
    """What is wrong with commits (name, subject, body), a line each."""
    for commit, subject, body in commits:
        if len(subject) > MAX_SUBJECT_CHARS:
            found = f"got {len(subject)}: {subject!r}; shorten it with git commit --amend or git rebase"
            yield f"{commit}: expected a subject of at most {MAX_SUBJECT_CHARS} characters, {found}"
        if not body.strip():
            yield f"{commit}: expected a body that says why, got none: {subject!r}"


if __name__ == "__main__":
    sys.exit(main())

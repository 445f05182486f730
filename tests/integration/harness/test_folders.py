"""Folders of clusters: one at a time is nobody else's business, and a killed owner's is swept."""

import subprocess
import sys
from pathlib import Path

from weft_devcluster.folders import owned_folder


def test_a_folder_goes_with_its_block_and_not_before(tmp_path: Path) -> None:
    with owned_folder("kind-", tmp_path) as first:
        (first / "file").touch()
        with owned_folder("kind-", tmp_path):
            assert first.is_dir(), "its owner lives"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owners_folder_is_swept_by_the_next(tmp_path: Path) -> None:
    code = "import sys; from weft_devcluster.folders import owned_folder\n"
    code += "from pathlib import Path\n"
    code += "with owned_folder('kind-', Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    tests = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(tests)},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        owner.kill()
    (left,) = tmp_path.iterdir()
    with owned_folder("kind-", tmp_path):
        assert not left.exists()

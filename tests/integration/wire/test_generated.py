"""The generated code is what the .proto files say."""

import subprocess
import sys
from pathlib import Path

from harness.processes import tied

ROOT = Path(__file__).parents[3]
V1 = Path("weft/wire/v1")


def test_generated_code_is_current(tmp_path: Path) -> None:
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / V1).glob("*.proto"))
    flags = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(tied(sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, *protos), cwd=ROOT, check=True)
    fresh = {p.name: p.read_text() for p in (tmp_path / V1).iterdir()}
    kept = {name: (ROOT / V1 / name).read_text() for name in fresh}
    assert fresh == kept, "run `make proto`"

"""`python -m weft_runner.model.cuda.measuring`: the first GPU's rates, for who plans (`offload.wire`).

The question and the answer are JSON: `{"folder", "spec", "formats", "most_bytes"}`, and `{"machine": rates}`, or
`{"error": NAME, "message": ...}` with exit code 1.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft_runner.errors import RunnerError
from weft_runner.model.cuda.device import GpuUnavailable, find_gpu
from weft_runner.offload.wire import spec_of


def main() -> int:
    try:
        answer = {"machine": _measured(json.load(sys.stdin))}
    except (RunnerError, GpuUnavailable) as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    json.dump(answer, sys.stdout)
    return "error" in answer


def _measured(asked: Mapping[str, Any]) -> dict[str, Any]:
    gpu, spec = find_gpu(), spec_of(asked["spec"])
    from weft_runner.model.cuda.machine_rates import measure_gpu_rates  # only with Triton, which `find_gpu` has found

    return asdict(measure_gpu_rates(Path(asked["folder"]), spec, asked["formats"], gpu, asked["most_bytes"]))


if __name__ == "__main__":
    sys.exit(main())

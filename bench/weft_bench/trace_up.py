"""`python -m weft_bench.trace_up TABLE FLAGS`: `weft up` with the runners of `weft_bench.trace_runner`."""

import argparse
import sys
from pathlib import Path

from weft_cli.errors import CommandError
from weft_cli.up import up


def main(argv: list[str]) -> int:
    """The exit code of `weft up`."""
    parser = argparse.ArgumentParser(prog="weft_bench.trace_up", allow_abbrev=False)
    parser.add_argument("table", type=Path)
    parser.add_argument("--step-ms", default="0")
    parser.add_argument("--best-batch", default="1")
    parser.add_argument("-f", dest="manifests", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--auth", action="store_true")
    given = parser.parse_args(argv)
    try:
        return up(
            data_dir=given.data_dir, port=given.port, auth=given.auth, file_root=None, files=[given.manifests],
            demo=False, exit_after=False, executor="cpu", log_level="INFO",
            runner=("weft_bench.trace_runner", str(given.table.resolve()), given.step_ms, given.best_batch),
        )  # fmt: skip
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

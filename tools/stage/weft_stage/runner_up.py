"""`python -m weft_stage.runner_up MODULE ARGUMENTS -- FLAGS`: `weft up` with runners `python -m MODULE ARGUMENTS`."""

import argparse
import sys
from pathlib import Path

from weft_cli.errors import CommandError
from weft_cli.up import up


def main(argv: list[str]) -> int:
    """The exit code of `weft up`."""
    at = argv.index("--")
    parser = argparse.ArgumentParser(prog="weft_stage.runner_up", allow_abbrev=False)
    parser.add_argument("-f", dest="manifests", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--auth", action="store_true")
    given = parser.parse_args(argv[at + 1 :])
    try:
        return up(
            data_dir=given.data_dir, port=given.port, auth=given.auth, file_root=None, files=[given.manifests],
            demo=False, exit_after=False, executor="cpu", log_level="INFO", runner=tuple(argv[:at]),
        )  # fmt: skip
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

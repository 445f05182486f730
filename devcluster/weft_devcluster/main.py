"""The command behind the Makefile's targets for clusters.

python -m weft_devcluster build     build and install what clusters are made of
python -m weft_devcluster check     say whether this machine can run a node (exit 3: no)
python -m weft_devcluster up        a node for a person; prints what to export
python -m weft_devcluster down      end it
python -m weft_devcluster status    what is running
python -m weft_devcluster bench-operator [OPTION ...]   `weft bench operator` on a control plane of its own
"""

import sys
from collections.abc import Sequence

from weft_devcluster import dev
from weft_devcluster.bench import bench_operator
from weft_devcluster.build import build_all
from weft_devcluster.errors import ClusterError, ToolMissing
from weft_devcluster.machine import check_node

FAILED, USAGE, CANNOT = 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """Run a command. Returns the exit code: 0 done, 1 failed, 2 unknown command, 3 this machine cannot."""
    try:
        return _run(arguments)
    except ToolMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _run(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["build"]:
            print(build_all())
        case ["check"]:
            check_node()
            print("this machine can run a node")
        case ["up"]:
            dev.up()
        case ["down"]:
            dev.down()
        case ["status"]:
            print(dev.describe())
        case ["serve", ready]:
            dev.serve(int(ready))
        case ["bench-operator", *options]:
            return bench_operator(options)
        case _:
            print(__doc__, file=sys.stderr)
            return USAGE
    return 0

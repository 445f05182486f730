"""The command behind the Makefile's targets for clusters.

python -m harness.cluster build     build and install what clusters are made of
python -m harness.cluster check     say whether this machine can run a node (exit 3: no)
python -m harness.cluster up        a node for a person; prints what to export
python -m harness.cluster down      end it
python -m harness.cluster status    what is running
python -m harness.cluster bench-operator [OPTION ...]   `weft bench operator` on a control plane of its own
python -m harness.cluster summary   write docs/benchmarks/cluster.md from the last `make test-cluster`
"""

import sys
from collections.abc import Sequence

from harness.cluster import dev
from harness.cluster.bench import bench_operator
from harness.cluster.build import build_all
from harness.cluster.errors import ClusterError, ToolMissing
from harness.cluster.machine import check_node
from harness.cluster.summary import write_summary

FAILED, USAGE, CANNOT = 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 unknown command, 3 this machine cannot."""
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
        case ["summary"]:
            print(write_summary())
        case _:
            print(__doc__, file=sys.stderr)
            return USAGE
    return 0

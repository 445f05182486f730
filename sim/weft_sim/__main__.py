"""`python -m weft_sim check`, `speed` and `splitwise`."""

import argparse
import sys

from weft_sim import check, speed, splitwise_run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weft_sim", description="The shipped machines on a virtual clock.")
    commands = parser.add_subparsers(required=True)
    checking = commands.add_parser("check", help="run drawn scenarios with faults and drafts, and watch the laws")
    check.add_arguments(checking)
    checking.set_defaults(run=check.main)
    speeding = commands.add_parser("speed", help="simulated requests a second of one core")
    speed.add_arguments(speeding)
    speeding.set_defaults(run=speed.main)
    splitting = commands.add_parser("splitwise", help="a trace as splitwise-sim serves it")
    splitwise_run.add_arguments(splitting)
    splitting.set_defaults(run=splitwise_run.main)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())

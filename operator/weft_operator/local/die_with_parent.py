"""Becomes another program that dies with its parent: `python -I -S die_with_parent.py PARENT_PID PROGRAM ARGS...`

A wrapper that is exec'd, not a hook between fork and exec: the parent has gRPC threads, and Python code in a forked
child of a threaded process can deadlock. The kernel sends SIGKILL when the parent's thread that started us ends, also
after `kill -9`; the check afterwards closes the gap in which the parent may already have died. Linux only; elsewhere
children end on the parent's SIGTERM alone.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, program = int(argv[0]), argv[1]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    os.execv(program, argv[1:])  # noqa: S606 (the parent's own command line)


if __name__ == "__main__":
    main(sys.argv[1:])

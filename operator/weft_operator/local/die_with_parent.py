"""Becomes another program that dies with its parent: `python -I -S die_with_parent.py PARENT_PID PROGRAM ARGS...`

This wrapper is exec'd, instead of a hook between fork and exec. The parent has gRPC threads, and Python code in a
forked child of a threaded process can deadlock. The kernel sends SIGKILL when the parent's starting thread ends, also
after `kill -9`. The parent may die before the call to prctl; the check afterwards covers this case. Linux only: on
other systems children end only on the parent's SIGTERM.
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
    os.execv(program, argv[1:])  # noqa: S606 (the parent's command line)


if __name__ == "__main__":
    main(sys.argv[1:])

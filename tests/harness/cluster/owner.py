"""What is left of a cluster whose owner was killed: a check that both levels share."""

import subprocess
import sys

from weft_devcluster.processes import has_ended, wait_until

OWNER = """
import sys
from weft_devcluster.{module} import {name}
with {name}() as made:
    print(*{pids}, flush=True)
    sys.stdin.read()
"""


def kill_owner(module: str, name: str, pids: str) -> list[int]:
    """Let a process own `cluster.MODULE.NAME`, kill it, wait until all `pids` (an expression over `made`) have ended.

    Returns them. Raises StartFailed for one that outlives its owner.
    """
    command = [sys.executable, "-c", OWNER.format(module=module, name=name, pids=pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        told = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    for pid in told:
        wait_until(lambda pid=pid: has_ended(pid), f"process {pid} ends with its owner")
    return told

"""`python -m harness.spread_runner HERE OTHER ENTER FLAGS`: a runner of ranks on two hosts, as two pods of a set.

HERE, OTHER: addresses of both; ENTER: what a command of the other host begins with (`harness.hosts`), as one word.
Rank 0 is this process. The other host has the base on a disk of its own: the depot is not there.
"""

import sys

from harness.ports import free_ports
from harness.processes import start
from weft_runner.main import main
from weft_runner.settings import parse_settings
from weft_runner.shell.depot import DepotSource


def run(here: str, other: str, enter: str, flags: list[str]) -> int:
    """The exit code of rank 0."""
    settings = parse_settings(flags)
    ranks, probes, kv = free_ports(3)
    folder = settings.data_dir.with_name(f"{settings.data_dir.name}-other")
    DepotSource(settings.depot, folder / "blobs", settings.base_digest, lambda: False).base()
    own = {"data-dir": folder, "probes": f"{other}:{probes}", "kv-listen": f"{other}:{kv}", "advertise": f"{other}:1"}
    flags = [*flags, f"--leader={here}:{ranks}"]
    other_host = own | {"host": "1/2"}
    start(*enter.split(), sys.executable, "-m", "weft_runner", *flags, *(f"--{k}={v}" for k, v in other_host.items()))
    ports = {"listen": settings.listen, "kv-listen": settings.kv_listen}  # where the other host reaches them
    return main([*flags, "--host=0/2", *(f"--{k}={here}:{at.rpartition(':')[2]}" for k, at in ports.items())])


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:4], sys.argv[4:]))

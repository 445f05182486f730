"""Run the README's two commands, and the slow tests, on a fresh machine: `make test-fresh`, or
`python -m harness.fresh`, as root.

The machine is Debian's smallest system with what the README asks for, in a folder: once without a compiler and once
with g++. Each gets a clone of this checkout's last commit; `make up` has to answer all questions right and to end at a
Ctrl-C. Mounts and processes are in namespaces of their own, which the kernel takes with their first process, however
it ends; then the folder is removed. Proxies and certificates are this machine's.

Exit codes: 0; 1 where a command failed; 3 where this machine lacks something, which is named.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = "python3,python3-venv,make,git,ca-certificates"  # git: for the clone
MACHINES = {"no compiler": (), "g++": ("g++",)}
COMMANDS = ("up", "test", "test-slow")
CHECKOUT = "root/weft"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
ENVIRONMENT = {
    "HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "NO_COLOR": "1",
    "DEBIAN_FRONTEND": "noninteractive",
    "SSL_CERT_FILE": f"/{CERTIFICATES}",  # uv knows authorities of its own only, and this machine may have others
}  # fmt: skip
PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
ADOPTED = re.compile(r"Acquire::(https?::\w|Check-Valid-Until)")  # of apt's settings
NAMESPACES = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
STOP_S = 60.0  # for a Ctrl-C, until all is gone
RIGHT, SERVES = re.compile(r"^(\d+) of \1 right"), "Ctrl-C stops everything"


Outcome = tuple[str, str, bool, float]  # the machine, what was made there, whether it passed, and seconds


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="harness.fresh", description=__doc__)
    parser.add_argument("--command", choices=COMMANDS, help="default: all")
    parser.add_argument("--suite", default="trixie", help="Debian's release; trixie has Python 3.13")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--machine", choices=MACHINES, help="default: both")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # the folder, in namespaces of its own
    given = parser.parse_args(argv)
    if given.inside:
        machines = [given.machine] if given.machine else list(MACHINES)
        commands = [given.command] if given.command else COMMANDS
        return run_all(given.inside, given.suite, given.mirror, machines, commands)
    if missing := lacking():
        sys.stderr.write(f"error: {missing}\n")
        return 3
    folder = Path(tempfile.mkdtemp(prefix="weft-fresh-", dir="/var/tmp"))  # a gigabyte: no tmpfs
    try:
        inside = (sys.executable, "-m", "harness.fresh", *(argv or sys.argv[1:]), "--inside", str(folder))
        return subprocess.run([*NAMESPACES, *inside], check=False).returncode
    finally:
        assert str(folder) not in Path("/proc/self/mountinfo").read_text(), f"{folder}: something is mounted there"
        shutil.rmtree(folder)


def lacking() -> str:
    """What this machine lacks for it; empty: nothing."""
    if os.geteuid() != 0:
        return "a fresh machine is made as root"
    tools = {"debootstrap": "debootstrap debian-archive-keyring", "unshare": "util-linux", "git": "git"}
    return next((f"there is no {tool}: apt install {of}" for tool, of in tools.items() if not shutil.which(tool)), "")


def run_all(folder: Path, suite: str, mirror: str, machines: Sequence[str], commands: Sequence[str]) -> int:
    """Make the machines in `folder` and run the commands there. Returns the exit code."""
    system = folder / "system"
    say(f"{suite}, as small as it comes, with {NEEDED}")
    debootstrap = ("debootstrap", "--variant=minbase", f"--include={NEEDED}", suite, str(system), mirror)
    with (folder / "debootstrap.log").open("w") as log:
        made = subprocess.run(debootstrap, stdout=log, stderr=log, check=False)
    if made.returncode:
        say("".join((folder / "debootstrap.log").read_text().splitlines(keepends=True)[-5:]))
        return 1
    adopt_network(system)
    outcomes = [outcome for name in machines for outcome in run_machine(folder, system, name, commands)]
    for machine, command, passed, wall_s in outcomes:
        say(f"{machine:<12} make {command:<9} {'passed' if passed else 'FAILED'}  {wall_s:7.1f} s")
    return 0 if all(passed for _, _, passed, _ in outcomes) else 1


def adopt_network(system: Path) -> None:
    """Names, certificates, proxies and package indexes as this machine has them; a mirror that stands still, too."""
    for name in ("etc/resolv.conf", "etc/hosts", CERTIFICATES, "etc/pip.conf"):
        if (own := Path("/") / name).exists():
            shutil.copy(own, system / name)
    if shutil.which("apt-config"):
        told = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
        lines = [line for line in told.splitlines(keepends=True) if ADOPTED.match(line)]
        (system / "etc/apt/apt.conf.d/90-as-outside").write_text("".join(lines))


def run_machine(folder: Path, system: Path, name: str, commands: Sequence[str]) -> list[Outcome]:
    """A copy of `system` with the machine's packages, its mounts, a clone, and the commands, one after the other."""
    root = folder / "machine"
    subprocess.run(["cp", "--archive", "--reflink=auto", system, root], check=True)
    for mount in (("-t", "proc", "proc"), ("--rbind", "/sys"), ("--rbind", "/dev")):
        subprocess.run(["mount", *mount, str(root / Path(mount[-1]).name)], check=True)
    if packages := MACHINES[name]:
        install = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)
        for command in (("apt-get", "update", "-qq"), install):
            subprocess.run(chrooted(root, "/", *command), stdout=subprocess.DEVNULL, check=True)
    source = ("git", "-c", f"safe.directory={ROOT}", "-c", f"safe.directory={ROOT}/.git", "clone", "--quiet", str(ROOT))
    subprocess.run([*source, str(root / CHECKOUT)], check=True)
    outcomes: list[Outcome] = []
    for command in commands:
        say(f"--- {name}: make {command}")
        began = time.monotonic()
        passed = run_up(root) if command == "up" else run_to_end(root, command)
        outcomes.append((name, command, passed, time.monotonic() - began))
    subprocess.run(["umount", "--recursive", root / "dev", root / "sys", root / "proc"], check=True)
    shutil.rmtree(root)
    return outcomes


def run_up(root: Path) -> bool:
    """Run `make up` until it serves, then press Ctrl-C. Returns whether all was right and it ended."""
    right = False
    command = chrooted(root, f"/{CHECKOUT}", "make", "up")
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        stays = threading.Timer(STOP_S, os.killpg, (process.pid, signal.SIGKILL))
        for line in process.stdout:
            say(line, end="")
            right = right or RIGHT.match(line) is not None
            if SERVES in line:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the foreground
                stays.start()
        stays.cancel()
    if process.returncode == -signal.SIGKILL:
        say(f"`make up` did not end within {STOP_S:g} s of a Ctrl-C")
        return False
    return right


def run_to_end(root: Path, target: str) -> bool:
    done = subprocess.run(chrooted(root, f"/{CHECKOUT}", "make", target), stdin=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def chrooted(root: Path, folder: str, *command: str) -> list[str]:
    """The command there, with an environment of its own."""
    variables = ENVIRONMENT | {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    words = [f"{name}={value}" for name, value in variables.items()]
    return ["chroot", str(root), "env", "--ignore-environment", f"--chdir={folder}", *words, *command]


def say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

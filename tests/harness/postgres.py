"""A real PostgreSQL server in a folder of its own, stopped and started by tests. As root it runs as `postgres`."""

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import URL

from harness import processes
from harness.ports import free_port
from harness.waiting import PATIENCE_S, wait_until
from weft_devcluster.processes import has_ended

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parent.parent.name))
USER = "postgres"
FLAGS = (
    "fsync=off",  # these servers die by signals, not by power cuts; what the kernel has is not lost
    "full_page_writes=off",
    "max_connections=100",
    "listen_addresses=127.0.0.1",
    "dynamic_shared_memory_type=mmap",  # in the folder, where nothing of it is left
)


def missing() -> str | None:
    """Say why no server can be started here; None: one can."""
    if not BINARIES:
        return "no PostgreSQL server below /usr/lib/postgresql: apt-get install postgresql"
    return (
        None
        if processes.SETPRIV or os.geteuid()
        else "no setpriv, and PostgreSQL does not run as root: apt-get install util-linux"
    )


needs_postgres = pytest.mark.skipif(missing() is not None, reason=missing() or "")
DIALECTS = ["sqlite", pytest.param("postgresql", marks=needs_postgres)]


@contextlib.contextmanager
def postgres_server() -> Generator["Postgres"]:
    """Run a server. Whoever stops it in between starts it again."""
    with tempfile.TemporaryDirectory(prefix="weft-postgres-") as folder:
        server = Postgres(Path(folder))
        try:
            server.start()
            yield server
        finally:
            if server.running:
                server.stop(signal.SIGQUIT)


class Postgres:
    """One server. Its port stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self._bin, self._folder = BINARIES[-1].parent, folder
        self._user = USER if os.geteuid() == 0 else ""
        if self._user:
            shutil.chown(folder, self._user, self._user)
            _let_pass(folder.parent)
        flags = ("-U", USER, "-A", "trust", "-N", "-E", "UTF8", "--locale=C", "--wal-segsize=1")
        done = subprocess.run(
            processes.tied(self._bin / "initdb", "-D", folder / "data", *flags, user=self._user),
            cwd=folder,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._unused = list[str]()

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        data = ("-D", self._folder / "data", "-p", str(self.port), "-k", self._folder)
        flags = [word for flag in FLAGS for word in ("-c", flag)]
        with (self._folder / "log").open("ab") as log:
            started = self._process = processes.start(
                *(self._bin / "postgres", *data, *flags),
                user=self._user,
                stderr=log,
                stdout=log,
                start_new_session=True,
            )
        wait_until(lambda: self._takes_connections(started), "PostgreSQL takes connections")

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server. SIGINT: at once, clients are cut off, nothing is lost. SIGKILL: every process dies there."""
        assert self._process is not None
        if number == signal.SIGKILL:
            self.freeze()  # none is born meanwhile
            pids = self._pids()
            self._signal_all(number)
            self._process.wait()
            wait_until(lambda: all(map(has_ended, pids)), "every process of PostgreSQL has ended")
        else:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
        self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """Let every process stand still: connections stay, nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def url(self, database: str) -> URL:
        return URL.create("postgresql+asyncpg", username=USER, host="127.0.0.1", port=self.port, database=database)

    @contextlib.contextmanager
    def database(self) -> Generator[URL]:
        """Give an empty database. The next test gets the same, emptied: a new one is 300 files."""
        if self._unused:
            name = self._unused.pop()
            who = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            self._execute(f"{who}; ALTER DATABASE {name} RESET ALL")
            self._execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public", name)
        else:
            name = f"weft_{uuid.uuid4().hex[:12]}"
            self._execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self._unused.append(name)

    async def execute(self, statement: str, database: str = "postgres") -> None:
        await execute(self.url(database), statement)

    def _execute(self, statement: str, database: str = "postgres") -> None:
        """Execute a statement, whether a loop runs here or not."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, self.execute(statement, database)).result()

    def _takes_connections(self, process: subprocess.Popen[bytes]) -> bool:
        """True where the server takes connections, which it says where `pg_ctl` asks: in a file, beside its number."""
        assert process.poll() is None, (self._folder / "log").read_text()
        try:
            lines = (self._folder / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(process.pid) and lines[7].strip() == "ready"

    def _pids(self) -> list[int]:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def _signal_all(self, number: int) -> None:
        """Signal all processes, and before them the first one, which starts the others."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


async def execute(url: URL, statements: str) -> None:
    """Execute them on a connection of their own."""
    connection = await asyncpg.connect(_plain(url), timeout=PATIENCE_S)
    try:
        await connection.execute(statements)
    finally:
        await connection.close()


def dump(url: URL) -> str:
    """Return statements that make in an empty database what this one has."""
    command = [BINARIES[-1].parent / "pg_dump", "--inserts", "--no-owner", "--no-privileges", "--no-comments"]
    done = subprocess.run([*command, _plain(url)], capture_output=True, text=True, check=True)
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("\\"))  # psql's own commands


def _plain(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string()


def _let_pass(folder: Path) -> None:
    """Let a server with another user get to its folder, below one that may be ours alone."""
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IXOTH)

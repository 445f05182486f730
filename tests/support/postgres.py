"""A real PostgreSQL server in a folder of its own, stopped and started by tests. As root it runs as `postgres`."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import URL

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parent.parent.name))
USER = "postgres"
# No fsync: these servers die by signals, not by power cuts; what the kernel has is not lost.
FLAGS = (
    "-c",
    "fsync=off",
    "-c",
    "full_page_writes=off",
    "-c",
    "max_connections=100",
    "-c",
    "listen_addresses=127.0.0.1",
)


def missing() -> str | None:
    """Why no server can be started here; None: one can."""
    return None if BINARIES else "no PostgreSQL server below /usr/lib/postgresql (Debian: apt-get install postgresql)"


needs_postgres = pytest.mark.skipif(missing() is not None, reason=missing() or "")
DIALECTS = ["sqlite", pytest.param("postgresql", marks=needs_postgres)]


class Postgres:
    """One server. Its port stays the same when it is started again."""

    def __init__(self) -> None:
        self._bin = BINARIES[-1].parent
        self.folder = Path(tempfile.mkdtemp(prefix="weft-postgres-"))
        self._user = USER if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self.folder, self._user, self._user)
        self._run(
            "initdb", "-D", str(self.folder / "data"), "-U", USER, "-A", "trust", "-N", "-E", "UTF8", "--locale=C"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        data = ("-D", str(self.folder / "data"), "-p", str(self.port), "-k", str(self.folder))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", *data, *FLAGS], stderr=log, stdout=log, user=self._user, start_new_session=True
            )
        while subprocess.run(
            [self._bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-t", "1"], check=False
        ).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT: at once, clients are cut off, nothing is lost. SIGKILL: every process of it dies where it is."""
        assert self._process is not None
        if number == signal.SIGKILL:
            self._signal_all(number)
        else:
            self._process.send_signal(number)
        self._process.wait(30)
        self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """Every process of it stands still: connections stay, nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            os.kill(pid, number)

    def close(self) -> None:
        if self._process is not None:
            self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)

    def url(self, database: str) -> URL:
        return URL.create("postgresql+asyncpg", username=USER, host="127.0.0.1", port=self.port, database=database)

    async def new_database(self) -> URL:
        """An empty database."""
        name = f"weft_{uuid.uuid4().hex[:12]}"
        await self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    async def execute(self, statement: str, database: str = "postgres") -> None:
        connection = await asyncpg.connect(host="127.0.0.1", port=self.port, user=USER, database=database)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments], user=self._user, cwd=self.folder, capture_output=True, check=False
        )
        assert not check or done.returncode == 0, (done.stdout + done.stderr).decode()

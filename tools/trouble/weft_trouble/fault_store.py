"""Stores that `weft bench faults` strikes: a PostgreSQL behind a link, or the supervisor's SQLite file.

Their data lies on a file system in memory of a few megabytes, so that a full disk is that of the store alone; mounting
it needs the rights of the machine's administrator.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Protocol

import asyncpg

from weft_operator.local.sockets import PortSource
from weft_stage.errors import StackFailed
from weft_trouble.links import Links, Quality

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
USER, START_S, POLL_S, LOCK_S = "postgres", 60.0, 0.05, 60.0
POSTGRES_MB, SQLITE_MB = 384, 24
CONNECTIONS = 10
FAILOVER_S = 3.0
FLAGS = (
    "fsync=off", "listen_addresses=127.0.0.1", f"max_connections={CONNECTIONS}", "superuser_reserved_connections=3",
    "dynamic_shared_memory_type=mmap", "wal_keep_size=16MB", "max_wal_size=64MB", "min_wal_size=5MB",
)  # fmt: skip
SLOW = Quality(delay_s=1.0)  # each way: a statement takes two seconds more
CUT_OFF = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'weft'"
COUNTS = (
    "SELECT count(*) FROM outcomes WHERE request_id LIKE ",
    "SELECT count(*) FROM outcomes",
    "SELECT coalesce(sum(requests), 0) FROM usage",
)


class Store(Protocol):
    """The store of outcomes, and the faults that can strike it."""

    async def outcomes(self, name: str) -> int:
        """Count the outcomes of the requests whose ids begin with `name`."""
        ...

    async def balances(self) -> bool:
        """Return whether the usage counts as many requests as there are outcomes: each was counted once."""
        ...

    def struck(self, fault: str) -> contextlib.AbstractAsyncContextManager[None]: ...


class SqliteStore:
    """The supervisor's file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def outcomes(self, name: str) -> int:
        return await asyncio.to_thread(self._one, f"{COUNTS[0]}?", f"{name}-%")

    async def balances(self) -> bool:
        return await asyncio.to_thread(self._one, COUNTS[1]) == await asyncio.to_thread(self._one, COUNTS[2])

    @asynccontextmanager
    async def struck(self, fault: str) -> AsyncGenerator[None]:
        """Strike the file while the block runs. *locked*: another process has it. *full*: its disk has no byte left."""
        with _filled(self._path.parent) if fault == "full" else self._locked():
            yield

    @contextmanager
    def _locked(self) -> Generator[None]:
        other = sqlite3.connect(self._path, timeout=LOCK_S, isolation_level=None)
        try:
            other.execute("BEGIN EXCLUSIVE")
            yield
            other.execute("ROLLBACK")
        finally:
            other.close()

    def _one(self, query: str, *values: str) -> int:
        with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=LOCK_S)) as store:
            return store.execute(query, values).fetchone()[0]


class Server:
    """One PostgreSQL of our own, with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = PortSource(SystemRandom())(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def start(self) -> None:
        """Start it, and wait until it takes connections. Raises StackFailed."""
        flags = [word for flag in FLAGS for word in ("-c", flag)]
        command = ["-D", str(self.folder), "-p", str(self.port), "-k", str(self.folder.parent), *flags]
        log_path = self.folder.parent / f"{self.folder.name}.log"
        with log_path.open("ab") as log:
            command = _as_user("postgres", *command)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")  # noqa: ASYNC220
        end = time.monotonic() + START_S
        while True:
            try:
                return await (await self.connect("postgres")).close()
            except (OSError, asyncpg.PostgresError, TimeoutError) as error:
                if time.monotonic() > end or self.ended:
                    said = log_path.read_text(errors="replace")[-1000:]
                    raise StackFailed(f"PostgreSQL does not start: {error}\n{said}") from error
            await asyncio.sleep(POLL_S)

    def end(self, number: int) -> None:
        if self._process is None or self.ended:
            return
        if number == signal.SIGKILL:
            self.signal(signal.SIGSTOP)
        self.signal(number)
        self._process.wait(START_S)

    def signal(self, number: int) -> None:
        """Send a signal to the server and to the processes that it has started."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def connect(self, database: str = "weft") -> asyncpg.Connection:
        return await asyncpg.connect(
            host="127.0.0.1", port=self.port, user=USER, database=database, timeout=int(START_S)
        )

    async def say(self, *statements: str) -> None:
        connection = await self.connect("postgres")
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()


class PostgresStore:
    """A server that takes writes, and another one that is its synchronous replica."""

    def __init__(self, folder: Path, links: Links) -> None:
        """`folder`: an empty one, which PostgreSQL's own user can get to."""
        self._folder, self._links = folder, links
        self._primary, self._numbers = Server(folder / "data-0"), itertools.count(1)
        self._replica: Server | None = None
        self._target = f"127.0.0.1:{self._primary.port}"  # of the link, whoever is the primary

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[str]:
        """Run both servers and give the URL of the database, through the link. Raises StackFailed."""
        if not BINARIES:
            raise StackFailed("no PostgreSQL server below /usr/lib/postgresql (Debian: apt-get install postgresql)")
        with _small_disk(self._folder, POSTGRES_MB):
            shutil.chown(self._folder, USER, USER)
            flags = ("-U", USER, "-A", "trust", "-N", "-E", "UTF8", "--locale=C", "--wal-segsize=1")
            await asyncio.to_thread(_run, "initdb", "-D", str(self._primary.folder), *flags)
            try:
                await self._primary.start()
                await self._primary.say("CREATE DATABASE weft")
                await self._replicate()
                yield f"postgresql://{USER}@{await self._links.forward(self._target)}/weft"
            finally:
                for server in filter(None, (self._primary, self._replica)):
                    server.end(signal.SIGQUIT)

    async def outcomes(self, name: str) -> int:
        return await self._one(f"{COUNTS[0]}$1", f"{name}-%")

    async def balances(self) -> bool:
        return await self._one(COUNTS[1]) == await self._one(COUNTS[2])

    @asynccontextmanager
    async def struck(self, fault: str) -> AsyncGenerator[None]:
        """Strike the server while the block runs.

        *kill*: SIGKILL, and started again at the end. *stop*: it stands still. *read-only*: it takes no writes. *slow*:
        every answer takes 2 s more. *crowded*: somebody else has all of its connections. *full*: its disk is.
        *failover*: SIGKILL, and after 3 s its replica takes its place.
        """
        primary = self._primary
        match fault:
            case "kill":
                primary.end(signal.SIGKILL)
                yield
                await primary.start()
            case "stop":
                primary.signal(signal.SIGSTOP)
                yield
                primary.signal(signal.SIGCONT)
            case "read-only":
                await primary.say("ALTER SYSTEM SET default_transaction_read_only = on")
                await primary.say("SELECT pg_reload_conf()", CUT_OFF)
                yield
                writable = "SET default_transaction_read_only = off"
                reset = "ALTER SYSTEM RESET default_transaction_read_only"
                await primary.say(writable, reset, "SELECT pg_reload_conf()", CUT_OFF)
            case "slow":
                self._links.degrade(self._target, SLOW)
                yield
                self._links.resume(self._target)
            case "crowded":
                await primary.say(CUT_OFF)
                async with contextlib.AsyncExitStack() as others:
                    for _ in range(CONNECTIONS):
                        with contextlib.suppress(asyncpg.TooManyConnectionsError):
                            others.push_async_callback((await primary.connect()).close)
                    yield
            case "full":
                with _filled(self._folder):
                    yield
                if primary.ended:
                    await primary.start()
            case "failover":
                primary.end(signal.SIGKILL)
                promotion = asyncio.create_task(self._promote())
                yield
                await promotion
                await self._replicate()
            case _:
                raise StackFailed(f"no fault of PostgreSQL: {fault}")

    async def _replicate(self) -> None:
        """Start a replica that follows the primary from now on: nothing is acknowledged that it does not have."""
        replica = Server(self._folder / f"data-{next(self._numbers)}")
        source = ("-h", "127.0.0.1", "-p", str(self._primary.port), "-U", USER)
        await asyncio.to_thread(_run, "pg_basebackup", *source, "-D", str(replica.folder), "-R", "-X", "stream")
        await replica.start()
        await self._primary.say("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        self._replica = replica

    async def _promote(self) -> None:
        assert self._replica is not None
        await asyncio.sleep(FAILOVER_S)
        shutil.rmtree(self._primary.folder)
        self._primary, self._replica = self._replica, None
        await self._primary.say("SELECT pg_promote()")
        self._links.move(self._target, f"127.0.0.1:{self._primary.port}")

    async def _one(self, query: str, *values: str) -> int:
        connection = await self._primary.connect()
        try:
            return int(await connection.fetchval(query, *values) or 0)
        finally:
            await connection.close()


def _as_user(program: str, *arguments: str) -> list[str]:
    """Return a command line that runs a program as another user: PostgreSQL refuses to run as root."""
    own = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--pdeathsig=KILL", "--"]
    return [*(own if os.geteuid() == 0 else ()), str(BINARIES[-1] / program), *arguments]


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run(_as_user(program, *arguments), capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise StackFailed(f"{program}: {done.stderr[-1000:]}")


@contextmanager
def _small_disk(folder: Path, megabytes: int) -> Generator[None]:
    """Mount a file system in memory at the folder. Raises StackFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount_command("mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", str(folder))
    try:
        yield
    finally:
        _mount_command("umount", "--lazy", str(folder))


@contextmanager
def small_disk_of_sqlite(data_dir: Path) -> Generator[None]:
    """Put the supervisor's folder of a stack that is not there yet on a small disk."""
    with _small_disk(data_dir / "supervisor", SQLITE_MB):
        yield


def _mount_command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackFailed(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def _filled(folder: Path) -> Generator[None]:
    """Fill the folder's file system to the last byte while the block runs."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    try:
        yield
    finally:
        filler.unlink()

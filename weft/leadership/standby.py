"""A service of which one process acts and others stand by (ADR 0024).

A standby waits for the Lease before it serves, and is Ready meanwhile: it stands by as it should. It does not listen,
so a client that tries every address of the service finds the one that acts. What acts goes on while the API server is
away; it ends once another process holds the Lease, or once it may have been stopped for too long to know. Who it may
still reach then refuses it by its term.

A process with a data directory of its own is known by it (`holder_name`): one that is killed and started again there
acts at once, because the process that held the Lease under that name is gone. Where processes share a data directory
each start has a name of its own (`new_identity`), and the Lease of a killed one has to expire.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from prometheus_client import Gauge

from weft.files import write_atomically
from weft.leadership.election import Election
from weft.leadership.errors import LeadershipLost
from weft.leadership.lease import LeaseTimings
from weft.process import CannotStart
from weft.settings import StandbySettings
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.serving import heartbeat

log = logging.getLogger(__name__)
NAME_FILE = "holder"
# A Lease that is not renewed for so long is another process's. Requests wait meanwhile, so it is short; a process that
# an API server or its own machine holds up for less than two thirds of it acts on (ADR 0024).
LEASE_S = 8.0


class Turn:
    """The time for which this process acts. Without a Lease its term is 0 and it never ends."""

    def __init__(self, term: int = 0, election: Election | None = None) -> None:
        self.term, self._election = term, election
        self.lost: LeadershipLost | None = None

    def require(self) -> None:
        """Check that this process may act. Raises LeadershipLost after a successor took over."""
        if self._election is not None:
            self._election.require()


@contextlib.asynccontextmanager
async def turn_of(
    settings: StandbySettings, identity: Callable[[], str], stop: asyncio.Event, probes: Probes | None, leader: Gauge
) -> AsyncGenerator[Turn | None]:
    """Wait until this process acts; None when `stop` came first. `stop` is set when the turn is lost.

    `identity()` is this process's name. `leader` is 1 while this process acts, for certain, and 0 before and after
    that. A Lease needs probes. Raises CannotStart.
    """
    if settings.lease is None:
        leader.set(1)
        yield Turn()
        return
    try:
        from weft.leadership.lease_api import LeaseApi, load_configuration
    except ImportError as error:
        raise CannotStart(f"--lease: {error}: pip install 'weft[kubernetes]'") from error
    assert probes is not None  # the settings have seen to it
    namespace, _, name = settings.lease.partition("/")
    api = LeaseApi(await load_configuration(), namespace, name)
    async with contextlib.aclosing(api):
        timings = LeaseTimings(LEASE_S)
        election = Election(api, identity=identity(), terms=timings, outlast=True)
        leader.set_function(lambda: float(election.leading))
        try:
            term = await _acquired(election, stop, probes)
            if term is None:
                yield None
                return
            turn = Turn(term, election)
            holding = asyncio.create_task(_hold(election, turn, stop))
            try:
                yield turn
            finally:
                holding.cancel()
        finally:
            await election.release()


def holder_name(data_dir: Path) -> str:
    """The name of whoever owns this data directory: made once, kept there."""
    path = data_dir / NAME_FILE
    if not path.exists():
        write_atomically(path, f"{socket.gethostname()}_{secrets.token_hex(4)}".encode())
    return path.read_text()


async def _acquired(election: Election, stop: asyncio.Event, probes: Probes) -> int | None:
    """Wait for this process's turn. Returns its term; None when `stop` came first."""
    log.info("standing by")
    asking, stopped = asyncio.create_task(election.acquire()), asyncio.create_task(stop.wait())
    beat = asyncio.create_task(heartbeat(probes))
    try:
        await asyncio.wait((asking, stopped), return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else await asking
    finally:
        for task in (asking, stopped, beat):
            task.cancel()
        await asyncio.gather(asking, stopped, beat, return_exceptions=True)


async def _hold(election: Election, turn: Turn, stop: asyncio.Event) -> None:
    try:
        await election.hold()
    except LeadershipLost as error:
        log.error("the turn is over: the process ends", extra=kv(reason=error))
        turn.lost = error
        stop.set()

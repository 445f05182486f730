"""Responses that later ones continue: kept for a stated time, and of a namespace the newest."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.batch import KeptResponse
from weft.store import responses
from weft_batch.tenant_files import now_unix_ms


@dataclass(frozen=True, slots=True)
class KeptResponses:
    """The kept responses. Each method raises NotPossible, StoreUnavailable."""

    engine: AsyncEngine
    hours: int = 720  # a response can be continued for 30 days, as at OpenAI
    most: int = 10_000  # of a namespace, the newest: no client that forgets to delete fills the store

    async def keep(self, new: KeptResponse) -> None:
        now = now_unix_ms()
        await responses.keep(
            self.engine, new, now_unix_ms=now, expires_unix_ms=now + 3_600_000 * self.hours, most=self.most
        )

    async def conversation(self, namespace: str, response_id: str, *, alone: bool) -> list[bytes]:
        """Read the response, and unless `alone` those before it; the eldest first."""
        now = now_unix_ms()
        if alone:
            return [await responses.find(self.engine, namespace, response_id, now_unix_ms=now)]
        return await responses.conversation(self.engine, namespace, response_id, now_unix_ms=now)

    async def delete(self, namespace: str, response_id: str) -> None:
        await responses.remove(self.engine, namespace, response_id)

    async def sweep(self) -> None:
        """Delete the responses that have expired."""
        await responses.forget(self.engine, now_unix_ms=now_unix_ms())

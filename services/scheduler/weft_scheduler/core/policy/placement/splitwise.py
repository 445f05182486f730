"""Placement of prompt and token phase on runners of their own (Splitwise, section 4.2); `README.md` has the rules."""

from collections.abc import Container, Iterable
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import NamedTuple

from weft.domain.ids import BASE
from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.placement.capacity_treap import RunnerKey
from weft_scheduler.core.policy.placement.policy import Choice, PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerEntry, RunnerIndex, RunnerShape


class KvDomain(NamedTuple):
    """Runners that can hand KV to each other. `kv_layout` "": the runner hands no KV over."""

    kv_layout: str
    numerics_class: str  # "": any


def domain_of(shape: RunnerShape, across_classes: bool) -> KvDomain:
    """Return the domain of that shape. `across_classes`: KV may go to a runner of another numerics class."""
    return KvDomain(shape.kv_layout, "" if across_classes and shape.kv_layout else shape.numerics_class)


def can_split(
    accepting: Iterable[tuple[RunnerRole, RunnerShape]], rank: int, context_tokens: int, across_classes: bool
) -> bool:
    """Return whether `Splitwise` can place such a request: on a mixed runner, or on two runners that exchange KV.

    False: only one runner for both phases is left for it, whatever that runner's role is.
    """
    sides: dict[KvDomain, set[RunnerRole]] = {}
    for role, shape in accepting:
        if shape.fits(rank, context_tokens):
            sides.setdefault(domain_of(shape, across_classes), set()).add(role)
    pair = {RunnerRole.PROMPT, RunnerRole.TOKEN}
    return any(RunnerRole.MIXED in roles or (pair <= roles and domain.kv_layout) for domain, roles in sides.items())


class Splitwise:
    """Placement on the prompt runner with the fewest queued tokens, and the token runner with the fewest reserved."""

    def __init__(self, across_classes: bool = False) -> None:
        self._across_classes = across_classes
        self._prompt = RunnerIndex()  # prompt runners whose queue is open, by that queue
        self._token = RunnerIndex()  # token runners, by what is reserved
        self._mixed = RunnerIndex()  # mixed runners whose queue is open, by that queue
        self._mixed_token = RunnerIndex()  # mixed runners, by what is reserved

    def update(self, runner: RunnerLoad) -> None:
        uuid, role = runner.uuid, runner.role
        pending, reserved = RunnerKey(-runner.pending_prompt_tokens, uuid), RunnerKey(-runner.reserved_tokens, uuid)
        rest = runner.free_tokens, runner.busy_adapters, runner.full
        by_queue = RunnerEntry(runner.shape, pending, *rest) if runner.queue_open else None
        by_reserved = RunnerEntry(runner.shape, reserved, *rest)
        self._prompt.update(uuid, by_queue if role is RunnerRole.PROMPT else None)
        self._token.update(uuid, by_reserved if role is RunnerRole.TOKEN else None)
        self._mixed.update(uuid, by_queue if role is RunnerRole.MIXED else None)
        self._mixed_token.update(uuid, by_reserved if role is RunnerRole.MIXED else None)

    def remove(self, uuid: str) -> None:
        for index in self._indexes:
            index.update(uuid, None)

    def place(self, request: PlacementRequest, closed: Container[RunnerShape]) -> Choice | None:
        if request.one_runner:
            candidates = (self._best(index, request, request.footprint_tokens, closed) for index in self._unsplit)
            return next((Choice(key.uuid) for key in candidates if key is not None), None)
        domains = {domain_of(shape, self._across_classes) for index in self._indexes for shape in index.by_shape}
        choices = [choice for domain in domains if (choice := self._pair(request, closed, domain)) is not None]
        return max(choices, key=itemgetter(0))[1] if choices else None

    def placeable_shapes(self, request: PlacementRequest) -> AbstractSet[RunnerShape]:
        return {
            shape
            for index in self._indexes
            for shape in index.by_shape
            if shape.fits(request.rank, request.context_tokens, request.numerics_class)
            and index.best(shape, BASE, 0, request.avoid, request.skip_limit) is not None
        }

    def has_capacity(self, closed: Container[RunnerShape]) -> bool:
        """Return whether both sides of a pair have capacity. A request for one runner waits for the same."""
        prompt, token = (self._prompt, self._mixed), (self._token, self._mixed_token)
        return all(any(shape not in closed for index in side for shape in index.by_shape) for side in (prompt, token))

    def free_tokens(self) -> int:
        shapes = (*self._token.by_shape.values(), *self._mixed_token.by_shape.values())
        return max((shape.free_tokens for shape in shapes), default=0)

    def entries(self) -> dict[tuple[str, str], RunnerEntry]:
        names = ("prompt", "token", "mixed", "mixed token")
        indexes = zip(names, self._indexes, strict=True)
        return {(name, uuid): entry for name, index in indexes for uuid, entry in index.entries.items()}

    @property
    def _indexes(self) -> tuple[RunnerIndex, ...]:
        return self._prompt, self._token, self._mixed, self._mixed_token

    @property
    def _unsplit(self) -> tuple[RunnerIndex, ...]:
        """Indexes for both phases of a request on one runner, the most suited first."""
        return self._mixed, self._token, self._prompt

    def _pair(
        self, request: PlacementRequest, closed: Container[RunnerShape], domain: KvDomain
    ) -> tuple[tuple[int, RunnerKey], Choice] | None:
        """Return a domain's choice, after how much it is preferred: runners of one role first, then short queues."""

        def best(index: RunnerIndex, tokens: int) -> RunnerKey | None:
            return self._best(index, request, tokens, closed, domain)

        needed, first_tokens = request.footprint_tokens, min(request.prefill_tokens + 1, request.context_tokens)
        prompt = token = None
        if domain.kv_layout:
            prompt, token = best(self._prompt, first_tokens), best(self._token, needed)
        if prompt is None and token is None and (mixed := best(self._mixed, needed)) is not None:
            return (0, mixed), Choice(mixed.uuid)
        roles = (prompt is not None) + (token is not None)
        if domain.kv_layout:
            prompt = prompt or best(self._mixed, first_tokens)
            token = token or best(self._mixed_token, needed)
        if prompt is None or token is None:
            return None
        return (roles, prompt), Choice(prompt.uuid, token.uuid)

    def _best(
        self,
        index: RunnerIndex,
        request: PlacementRequest,
        tokens: int,
        closed: Container[RunnerShape],
        domain: KvDomain | None = None,
    ) -> RunnerKey | None:
        """Return the preferred runner of an index with `tokens` tokens free.

        A runner on which the adapter is busy is preferred to one whose queue, or reservations, are shorter by no more
        than the request's own.
        """
        keys = [
            index.best(
                shape, request.adapter, tokens, request.avoid, request.skip_limit,
                adapter_bytes=request.adapter_bytes, slack=tokens,
            )
            for shape in index.by_shape
            if shape not in closed
            and shape.fits(request.rank, request.context_tokens, request.numerics_class)
            and domain in (None, domain_of(shape, self._across_classes))
        ]  # fmt: skip
        return max((key for key in keys if key is not None), default=None)

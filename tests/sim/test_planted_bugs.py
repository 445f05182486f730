"""Bugs planted in the shipped cores: each is found, and named by the law that it breaks."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvRefuse
from weft.domain.machine import Peer
from weft.domain.request import OutcomeReport, SequenceTokens
from weft_gateway.core import Gateway, RequestStream
from weft_runner.core.adapters.manager import AdapterManager
from weft_runner.core.page_table import PageTable
from weft_runner.core.prefix.host import HostPrefixes
from weft_runner.core.prefix.reuse import PrefixReuse
from weft_runner.core.reporter import Reporter
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.transfer.hand_over import HandOver
from weft_runner.core.transfer.transfers import KvTransfers, OutgoingKv
from weft_scheduler.core import Numbers, QueuePass
from weft_sim.check import check_seed

SEEDS = 500
WHOLE = "WEFT_TEST_EXAMPLES" in os.environ  # `make test-long`: from the first seed of these on
Plant = Callable[[pytest.MonkeyPatch], None]
OTHER_TEXT = "differs from the undisturbed|ends by"


def lost_token(patch: pytest.MonkeyPatch) -> None:
    """Drop the first token after a migration."""
    step = RequestStream._step

    def patched(self: RequestStream, event: SequenceTokens, now: float) -> Sequence[Any]:
        first = self.start_tokens and not self._begun
        lost = event._replace(tokens=event.tokens[1:], logprobs=event.logprobs[1:])
        return step(self, lost if first else event, now)

    patch.setattr(RequestStream, "_step", patched)


def double_token(patch: pytest.MonkeyPatch) -> None:
    """Count a step twice that comes twice."""
    step = RequestStream._step

    def patched(self: RequestStream, event: SequenceTokens, now: float) -> Sequence[Any]:
        late = self.running is not None and event.epoch == self.running.epoch and event.position < len(self.tokens)
        return step(self, event._replace(position=len(self.tokens)) if late else event, now)

    patch.setattr(RequestStream, "_step", patched)


def leaked_page(patch: pytest.MonkeyPatch) -> None:
    """Keep a page of a sequence that ends, and have the runner itself not check."""
    release = PageTable.release

    def patched(self: PageTable, key: str, *, forget: bool = False) -> int:
        held = release(self, key, forget=forget)
        if self._free:
            self._free.pop()
        return held

    patch.setattr(PageTable, "release", patched)
    patch.setattr("weft_runner.core.request_pool.check_page_table", lambda *_: None)


def starved_request(patch: pytest.MonkeyPatch) -> None:
    """Do not count overtaking."""
    patch.setattr(QueuePass, "count", lambda _, overtaken: [*overtaken])


def two_owners(patch: pytest.MonkeyPatch) -> None:
    """Do not stop a preempted sequence at its runner."""
    fail = RequestStream._fail_epoch

    def patched(self: RequestStream, *arguments: Any, stop: bool = False, **how: Any) -> Any:
        return fail(self, *arguments, stop=False, **how)

    patch.setattr(RequestStream, "_fail_epoch", patched)


def wrong_adapter(patch: pytest.MonkeyPatch) -> None:
    """Run rows with the adapter of the lowest slot."""
    slot_of = AdapterManager.slot_of

    def patched(self: AdapterManager, digest: str) -> int:
        return min(self.slots.by_slot, default=slot_of(self, digest))

    patch.setattr(AdapterManager, "slot_of", patched)


def epoch_twice(patch: pytest.MonkeyPatch) -> None:
    """Give every tenth epoch a second time."""
    next_epoch = Numbers.next_epoch

    def patched(self: Numbers) -> Epoch:
        epoch = next_epoch(self)
        return epoch if epoch.counter % 10 else Epoch(epoch.term, epoch.counter - 9)

    patch.setattr(Numbers, "next_epoch", patched)


def shared_across_adapters(patch: pytest.MonkeyPatch) -> None:
    """Let requests of different adapters share prefix pages."""
    name = PrefixReuse.chain
    patch.setattr(PrefixReuse, "chain", lambda self, start, long: name(self, replace(start, adapter=""), long=long))


def disordered_prefix(patch: pytest.MonkeyPatch) -> None:
    """Bring pages of earlier prompts back from host memory in the wrong order."""
    find = HostPrefixes.find
    patch.setattr(HostPrefixes, "find", lambda self, names: find(self, names)[::-1])


def endless_preemption(patch: pytest.MonkeyPatch) -> None:
    """Do not say in reports that a sequence stays."""
    state = Reporter._sequence_state
    patch.setattr(Reporter, "_sequence_state", lambda self, sequence: state(self, sequence)._replace(stays=False))


def lost_outcome(patch: pytest.MonkeyPatch) -> None:
    """Do not send outcomes again that no scheduler has acknowledged."""
    resubmit = Gateway._resubmit

    def patched(self: Gateway, now: float) -> Iterator[Any]:
        return (effect for effect in resubmit(self, now) if not isinstance(effect.message, OutcomeReport))

    patch.setattr(Gateway, "_resubmit", patched)


def pages_behind(patch: pytest.MonkeyPatch) -> None:
    """End what is sent of a chunk a page too early; the last pages are those before them."""
    send_pages = KvTransfers.send_pages

    def patched(self: KvTransfers, one: OutgoingKv, pages: list[int], until: int, **how: bool) -> None:
        send_pages(self, one, [pages[0], *pages[:-1]], until, **how)

    patch.setattr(KvTransfers, "send_pages", patched)


def prompt_runner_left_alone(patch: pytest.MonkeyPatch) -> None:
    """Stop, where an epoch ends, only the runner that receives KV; one that sends never gives up."""
    stop_all = RequestStream._stop_all

    def patched(self: RequestStream, *args: Any, **kwargs: Any) -> Any:
        before, self.runners = self.runners, self.runners[-1:]
        stops = stop_all(self, *args, **kwargs)
        self.runners = before
        return stops

    patch.setattr(RequestStream, "_stop_all", patched)
    patch.setattr(KvTransfers, "expire_offer", lambda *_: None)
    patch.setattr(HandOver, "expire", lambda *_: None)
    heard = HandOver.on_message

    def deaf(self: HandOver, peer: Peer, message: object, now: float) -> None:
        if not isinstance(message, KvRefuse):
            heard(self, peer, message, now)

    patch.setattr(HandOver, "on_message", deaf)


def batch_keeps_capacity(patch: pytest.MonkeyPatch) -> None:
    """Let no line of a batch leave its runner for an interactive request."""
    patch.setattr("weft_scheduler.core.cycle.preempt_batch", lambda *_: None)


def unbounded_guesses(patch: pytest.MonkeyPatch) -> None:
    """Draft beyond the pages of a sequence, and beyond its answer's length."""
    patch.setattr(RequestPool, "_max_guesses", lambda *_: 8)


# The law that finds it, and a seed from which on it is found soon.
PLANTED: dict[Plant, tuple[str, int]] = {
    lost_token: (OTHER_TEXT, 7),
    double_token: (OTHER_TEXT, 14),
    leaked_page: ("pages|have no end", 2),
    starved_request: ("has been passed", 3),
    two_owners: ("two owners|have no end", 17),
    wrong_adapter: (OTHER_TEXT, 2),
    epoch_twice: ("epoch", 2),
    shared_across_adapters: (OTHER_TEXT, 1),
    disordered_prefix: (OTHER_TEXT, 0),
    endless_preemption: ("is preempted 2 times", 1395),
    lost_outcome: ("no outcome|have no end", 6),
    pages_behind: (OTHER_TEXT, 0),
    prompt_runner_left_alone: ("two owners|still holds|have no end", 2),
    batch_keeps_capacity: (r"check\.py", 0),
    unbounded_guesses: ("index out of range", 0),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    law, near = PLANTED[plant]
    seeds = range(near - near % SEEDS, near - near % SEEDS + SEEDS)
    seeds = seeds if WHOLE else chain(range(near, seeds.stop), range(seeds.start, near))
    found = next((verdict for seed in seeds if (verdict := check_seed(seed)).fault), None)
    assert found is not None, f"all laws hold in {SEEDS} seeds"
    print(f"seed {found.seed}: {found.fault}")
    assert re.search(law, found.fault, re.IGNORECASE), found.fault

"""The numbers that this scheduler gives: epochs, versions, tickets; and the term that they are under."""

from weft.domain.ids import Epoch
from weft.domain.machine import PersistTerm
from weft.domain.runner import SchedulerHello
from weft_scheduler.core.state import State

# The file, the terms that supervisors have stored, and gateways' epochs raise the term. What runners report never does:
# the owner of a pool decides what runs in its runners, and could use the terms up.


def advance_term(state: State, term: int) -> None:
    """Stay above a term stored by a supervisor, even above this process's term before its first epoch."""
    if term > state.numbers.term or (term == state.numbers.term and not state.numbers.counter):
        _raise_term(state, term + 1)


def advance_epoch(state: State, epoch: Epoch) -> None:
    """Stay above an epoch known to a gateway."""
    if epoch > (state.numbers.term, state.numbers.counter):
        _raise_term(state, epoch.term + 1)


def _raise_term(state: State, term: int) -> None:
    state.numbers.begin(term)
    state.emit(PersistTerm(term))
    for pool in state.pools.values():
        pool.adapters.renumber(state.numbers.version())
    for supervisor in state.supervisors.values():
        state.send(supervisor, SchedulerHello(term))

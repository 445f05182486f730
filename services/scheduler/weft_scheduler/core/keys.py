"""The list of API keys that is in force, and for how long without a word from the store.

A supervisor sends its list when it changes, and confirms it each time that it has read the store. A supervisor that the
store is out of reach for confirms nothing, and its list may be an old one: the list of the highest version is in force,
whoever sends others. Versions fall where a database is restored or failed over without its last changes: then nobody
confirms the higher version any more, and a lower one that is confirmed takes its place after `keys_lapse_s`.

A list that nobody has confirmed for `keys_grace_s` is in force no more: gateways refuse every key (503) until one is
confirmed again. So whatever is out of reach, a key that was revoked opens nothing after that time.
"""

from math import inf

from weft.domain.machine import Peer
from weft.domain.routes import Keys, KeysConfirmed
from weft_scheduler.core.effects import Stale
from weft_scheduler.core.state import State
from weft_scheduler.core.status import publish_routes
from weft_scheduler.core.timers import Timer, TimerKind

TIMER = Timer(TimerKind.KEYS_UNCONFIRMED)


def on_keys(state: State, peer: Peer, keys: Keys) -> None:
    """Take a supervisor's list of keys. A list below the version in force is kept for later."""
    in_force = state.routes.key_list
    if (
        keys.version
        and keys.version < in_force.version
        and state.now < in_force.confirmed_at + state.config.keys_lapse_s
    ):
        in_force.keep_aside(keys)
        state.emit(Stale("keys", peer.name, f"version {keys.version} is older than {in_force.version}"))
        return
    in_force.replaced_by(keys.version, state.now if keys.version else inf)
    _expect_confirmation(state)
    if state.routes.set_keys(keys.keys):
        publish_routes(state)


def on_confirmed(state: State, peer: Peer, confirmed: KeysConfirmed) -> None:
    """Confirm the list in force, or take one kept aside: a supervisor has read the store."""
    in_force = state.routes.key_list
    aside = in_force.aside
    if confirmed.version >= in_force.version:
        in_force.confirm(state.now)
        _expect_confirmation(state)
        if state.routes.trust_keys(are_known=True):
            publish_routes(state)
    elif aside is not None and aside.version == confirmed.version:
        on_keys(state, peer, aside)


def on_unconfirmed(state: State, _: Timer) -> None:
    """Let gateways refuse every key: the grace is over."""
    state.emit(
        Stale("keys", "", f"nobody has confirmed them for {state.config.keys_grace_s:g} s: gateways refuse keys")
    )
    if state.routes.trust_keys(are_known=False):
        publish_routes(state)


def _expect_confirmation(state: State) -> None:
    at = state.routes.key_list.confirmed_at + (state.config.keys_grace_s or inf)
    if at < inf:
        state.timers.set(TIMER, at)
    else:
        state.timers.clear(TIMER)

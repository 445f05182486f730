"""Adapters that the registry has let go of: once nobody is served by them and no runner holds them, it is told so.

Its last word of an adapter is the status that is not routed and has no ready runner. A uid that nobody knows here has
gone already, or went with an earlier scheduler: that is told too, so whoever asks is always answered.
"""

from weft_scheduler.core.context import Context
from weft_scheduler.core.effects import AdapterStatus
from weft_scheduler.core.told import Departure


def depart(ctx: Context, uid: str) -> None:
    """The registry removes this adapter; before the state forgets it."""
    name = ctx.state.adapter_pool.get(uid)
    if name is not None:
        ctx.told.departures[uid] = Departure(name, ctx.state.pools[name].adapters[uid].digest)
    else:
        ctx.told.departures.setdefault(uid, Departure())


def tell_departures(ctx: Context) -> None:
    """Say of each that is gone that it is."""
    for uid, departure in list(ctx.told.departures.items()):
        if _is_gone(ctx, uid, departure):
            del ctx.told.departures[uid]
            ctx.emit(AdapterStatus(uid, departure.digest, False, 0, ()))


def _is_gone(ctx: Context, uid: str, departure: Departure) -> bool:
    pool = ctx.state.pools.get(departure.pool)
    if uid in ctx.told.routed:
        return False
    if pool is None or departure.digest in pool.desired.registered:
        return True  # nobody is there to hold it, or its content belongs to another adapter too
    if departure.digest in pool.desired.retired:
        return False  # streams may still use it
    return all(version >= pool.desired.list.version for version in pool.ready_versions)

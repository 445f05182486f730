"""The route table: served names from the registry, facts of pools from their runners, API keys from the supervisors.

Gateways are sent what changed since the version that they have; a change of one name costs what that name carries.
"""

from collections.abc import Callable, Iterable
from math import inf

from weft.domain.routes import KeyRoute, Keys, PoolRoute, Route, RouteBook, Routes, Unserved


class KeyList:
    """The version of the keys in force, when a supervisor confirmed it last, and a list of a lower version."""

    def __init__(self) -> None:
        self.version, self.confirmed_at = 0, -inf
        self.aside: Keys | None = None

    def replaced_by(self, version: int, now: float) -> None:
        self.version, self.confirmed_at, self.aside = version, now, None

    def confirm(self, now: float) -> None:
        self.confirmed_at = max(self.confirmed_at, now)

    def keep_aside(self, keys: Keys) -> None:
        self.aside = keys


class RouteTable:
    """The routes as they should be, and the table as it was published. Where names conflict the oldest adapter wins."""

    def __init__(self) -> None:
        self.book = RouteBook()  # as published
        self.keys: dict[str, KeyRoute] = {}
        self.keys_known = False
        self.key_list = KeyList()
        self._claims: dict[str, dict[str, Route]] = {}  # model name -> uid -> route
        self.unserved: dict[str, Unserved] = {}  # by uid
        self._changed_models: dict[str, None] = {}
        self._changed_pools: dict[str, None] = {}
        self._changed_keys: dict[str, None] = {}
        self._changed_unserved: dict[str, None] = {}
        self._full: Routes | None = None  # table of the book's version
        self._unapplied: dict[str, int] = {}  # uid -> the version that changed its route, lowest first

    # ------------------------------------------------------------ what should be routed

    def claim(self, route: Route) -> None:
        """Let a route claim its name."""
        self._claims.setdefault(route.model_name, {})[route.uid] = route
        self._changed_models[route.model_name] = None

    def withdraw(self, model_name: str, uid: str) -> None:
        """Let an adapter or pool claim a name no more, if it did."""
        claims = self._claims.get(model_name)
        if claims is not None and claims.pop(uid, None) is not None:
            if not claims:
                del self._claims[model_name]
            self._changed_models[model_name] = None

    def set_keys(self, keys: Iterable[KeyRoute]) -> bool:
        """Replace all API keys. Return True for a change."""
        old_keys, self.keys = self.keys, {key.key_hash: key for key in keys}
        changed = [h for h in {**old_keys, **self.keys} if old_keys.get(h) != self.keys.get(h)]
        self._changed_keys |= dict.fromkeys(changed)
        were_known, self.keys_known = self.keys_known, True
        return bool(changed) or not were_known

    def trust_keys(self, *, are_known: bool) -> bool:
        """Let gateways go by the keys, or not. True if that is a change."""
        were_known, self.keys_known = self.keys_known, are_known
        return were_known != are_known

    def pool_changed(self, pool: str) -> None:
        """Record that a pool's routes may have changed."""
        self._changed_pools[pool] = None

    def explain(self, unserved: Unserved) -> None:
        """Note why an adapter is not served."""
        self.unserved[unserved.uid] = unserved
        self._changed_unserved[unserved.uid] = None

    def forget_unserved(self, uid: str) -> None:
        """Explain an adapter no more: it is served, or gone."""
        if self.unserved.pop(uid, None) is not None:
            self._changed_unserved[uid] = None

    # ------------------------------------------------------------ the published table

    @property
    def published(self) -> bool:
        return bool(self.book.version)

    def is_routed(self, model_name: str, uid: str) -> bool:
        """Return whether the adapter has this name in the published table."""
        route = self.book.routes.get(model_name)
        return route is not None and route.uid == uid

    def publish(
        self, version: Callable[[], int], pool_route: Callable[[str], PoolRoute | None]
    ) -> tuple[Routes | None, list[str]]:
        """Publish the table's change. Returns it, and the uids that are routed now or no more; None: no change."""
        routes, removed_models, uids = self._models()
        pools = {name: pool_route(name) for name in sorted(self._changed_pools)}
        changed_pools = [p for name, p in pools.items() if p is not None and p != self.book.pools.get(name)]
        removed_pools = [name for name, pool in pools.items() if pool is None and name in self.book.pools]
        keys = {key_hash: self.keys.get(key_hash) for key_hash in sorted(self._changed_keys)}
        changed_keys = [k for key_hash, k in keys.items() if k is not None and k != self.book.keys.get(key_hash)]
        removed_keys = [key_hash for key_hash, key in keys.items() if key is None and key_hash in self.book.keys]
        unserved = {uid: self.unserved.get(uid) for uid in sorted(self._changed_unserved)}
        changed_unserved = [u for uid, u in unserved.items() if u is not None and u != self.book.unserved.get(uid)]
        removed_unserved = [uid for uid, refusal in unserved.items() if refusal is None and uid in self.book.unserved]
        self._changed_models, self._changed_pools, self._changed_keys, self._changed_unserved = {}, {}, {}, {}
        content = (
            routes, removed_models, changed_pools, removed_pools, changed_keys, removed_keys, changed_unserved,
            removed_unserved,
        )  # fmt: skip
        if self.published and not any(content) and self.keys_known == self.book.keys_known:
            return None, uids
        change = Routes(
            version=version(),
            full=not self.published,
            base_version=self.book.version,
            routes=tuple(routes),
            removed_models=tuple(removed_models),
            pools=tuple(changed_pools),
            removed_pools=tuple(removed_pools),
            keys=tuple(changed_keys),
            removed_keys=tuple(removed_keys),
            unserved=tuple(changed_unserved),
            removed_unserved=tuple(removed_unserved),
            keys_known=self.keys_known,
        )
        self.book.apply(change)
        self._full = None
        for uid in uids:
            self._unapplied.pop(uid, None)
            self._unapplied[uid] = change.version
        return change, uids

    def is_applied(self, uid: str) -> bool:
        """Return whether every gateway has applied the last change of an adapter's route."""
        return uid not in self._unapplied

    def applied(self, version: int | None) -> list[str]:
        """Record the version applied by every gateway; None if no gateway is awaited. Return the waiting uids."""
        done: list[str] = []
        for uid, changed in self._unapplied.items():
            if version is not None and changed > version:
                break
            done.append(uid)
        for uid in done:
            del self._unapplied[uid]
        return done

    def full(self) -> Routes:
        """Return the full published table, as one object per version, so that it is encoded once."""
        if self._full is None:
            book = self.book
            self._full = Routes(
                version=book.version,
                full=True,
                routes=tuple(book.routes[name] for name in sorted(book.routes)),
                pools=tuple(book.pools[name] for name in sorted(book.pools)),
                keys=tuple(book.keys[key_hash] for key_hash in sorted(book.keys)),
                keys_known=book.keys_known,
                unserved=tuple(book.unserved[uid] for uid in sorted(book.unserved)),
            )
        return self._full

    def _models(self) -> tuple[list[Route], list[str], list[str]]:
        """Return changed routes, removed names, and the uids of both."""
        changed: list[Route] = []
        removed: list[str] = []
        uids: dict[str, None] = {}
        for name in sorted(self._changed_models):
            claims = self._claims.get(name)
            winner = min(claims.values(), key=_age) if claims else None
            old_route = self.book.routes.get(name)
            if winner == old_route:
                continue
            if winner is not None:
                changed.append(winner)
                uids[winner.uid] = None
            else:
                removed.append(name)
            if old_route is not None:
                uids[old_route.uid] = None
        return changed, removed, [*uids]


def _age(route: Route) -> tuple[int, str]:
    """Return a key, older first; at the same second the smaller uid, so that every scheduler decides the same."""
    return route.created_unix_s, route.uid

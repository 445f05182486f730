"""Desired adapters as a supervisor sends them, with what a test does not care about left out."""

from collections.abc import Iterable
from typing import Any

from weft.domain.adapter import DesiredAdapter, DesiredChange, Tier
from weft_runner.core.adapters.manager import AdapterManager


def desired(digest: str, *, n_bytes: int = 0, pinned: bool = False, tier: Tier = Tier.REMOTE) -> DesiredAdapter:
    return DesiredAdapter(digest, 0, n_bytes, pinned, tier)


def whole(*adapters: DesiredAdapter, removed: Iterable[str] = (), version: int = 1) -> DesiredChange:
    """Everything that is held; of what was held before, `removed` has been deleted."""
    return DesiredChange(version, full=True, adapters=adapters, removed=tuple(removed))


def take_effects(manager: AdapterManager) -> list[Any]:
    """Take what has followed from the manager's calls since the last time."""
    effects = [*manager.effects]
    manager.effects.clear()
    return effects

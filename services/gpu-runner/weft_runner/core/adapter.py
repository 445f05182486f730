"""What the runner's books say of one adapter."""

from dataclasses import dataclass

from weft_runner.core.events import Tier


@dataclass(slots=True, eq=False)
class Adapter:
    """One digest that the runner knows. `slot` is set while loading and while on the device."""

    digest: str
    rank: int = 0
    n_bytes: int = 0  # on the device; before its first load what the list said, 0 where nobody knows
    sized: bool = False  # n_bytes is what it really takes
    host_bytes: int = 0  # of its copy in host memory, as far as one was ever read
    desired: bool = False
    protected: bool = False
    tier: Tier = Tier.REMOTE  # the least it is to be held in
    slot: int | None = None
    loading: bool = False
    fetching: bool = False  # on its way to its tier
    spoiled: bool = False  # the host copy that a load or a fetch will tell of has been dropped meanwhile
    on_disk: bool = False
    running: int = 0
    waiting: int = 0
    passed: int = 0
    cost: float = 0.0
    value: float = 0.0
    error: str = ""
    hopeless: bool = False  # the error is the artifact's: nobody waits for it any more
    shortfall: str = ""  # why it is held below its tier
    unpinned: str = ""  # why it is pinned and not protected

    @property
    def resident(self) -> bool:
        return self.slot is not None and not self.loading

"""The scheduler's settings: defaults < environment (`WEFT_SCHEDULER__FIELD`) < flags. Wrong values are all listed."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from weft.settings import (
    SCHEDULER,
    SCHEDULER_PROBES,
    Address,
    StandbySettings,
    data_dir_field,
    listen_field,
    probes_field,
)
from weft_scheduler.core.config import SchedulerConfig


class SchedulerSettings(StandbySettings):
    """Decides the runner of each request. Gateways, supervisors and the operator connect to it.

    Each flag can also be set as WEFT_SCHEDULER__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_SCHEDULER__", cli_prog_name="weft_scheduler")

    listen: Address = listen_field(SCHEDULER)
    probes: Address = probes_field(SCHEDULER_PROBES)
    data_dir: Path = data_dir_field("scheduler", "where the term is kept; one scheduler owns it")
    keys_grace_s: int = Field(
        600,
        ge=0,
        description="API keys are refused when the store has not confirmed them for this many seconds; 0: never",
    )

    def config(self) -> SchedulerConfig:
        """Return the limits and times of the core."""
        return SchedulerConfig(keys_grace_s=float(self.keys_grace_s))

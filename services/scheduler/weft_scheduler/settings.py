"""The scheduler's settings: defaults < environment (`WEFT_SCHEDULER__FIELD`) < flags. Wrong values are all listed."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from weft.settings import SCHEDULER, SCHEDULER_PROBES, Address, StandbySettings, data_dir_field
from weft_scheduler.core.config import SchedulerConfig


class SchedulerSettings(StandbySettings):
    """Decides which runner serves which request. Gateways, supervisors and the operator connect to it.

    Each flag can also be set as WEFT_SCHEDULER__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_SCHEDULER__", cli_prog_name="weft_scheduler")

    listen: Address = Field(SCHEDULER, description="HOST:PORT for gateways, supervisors and the registry (gRPC)")
    probes: Address = Field(SCHEDULER_PROBES, description="HOST:PORT for /healthz, /readyz and /metrics (HTTP)")
    data_dir: Path = data_dir_field("scheduler", "where the term is kept; one scheduler owns it")
    assign_ms: int = Field(5000, ge=1, description="an Assign neither started nor reported by then is taken back")
    avoid_ms: int = Field(3000, ge=1, description="a gateway avoids a runner whose session it lost; doubled each time")
    same_class_ms: int = Field(5000, ge=0, description="a request waits this long for a runner of its numerics class")
    drain_s: int = Field(300, ge=1, description="streams of a deleted or replaced adapter may run on this long")
    absent_ms: int = Field(10000, ge=1, description="a runner that no supervisor reports is gone after this long")
    keys_grace_s: int = Field(
        600, ge=0, description="API keys are refused when the store has not confirmed them for so long; 0: never"
    )
    status_ms: int = Field(200, ge=1, description="statuses to the registry are gathered this long")
    give_back_s: int = Field(60, ge=1, description="idle runners are kept this long, where a pool sets no time")
    window: int = Field(64, ge=1, description="how many waiting requests may block in one scheduling pass")
    max_outcomes: int = Field(20000, ge=1, description="outcomes kept until a supervisor has stored them")
    default_output_tokens: int = Field(
        256, ge=1, description="reserved without a prediction and before the first outcome"
    )

    def config(self) -> SchedulerConfig:
        """The limits and times of the core."""
        return SchedulerConfig(
            assign_s=self.assign_ms / 1000,
            avoid_s=self.avoid_ms / 1000,
            same_class_s=self.same_class_ms / 1000,
            drain_s=float(self.drain_s),
            absent_s=self.absent_ms / 1000,
            keys_grace_s=float(self.keys_grace_s),
            status_s=self.status_ms / 1000,
            give_back_s=float(self.give_back_s),
            window=self.window,
            max_outcomes=self.max_outcomes,
            default_output_tokens=self.default_output_tokens,
        )

"""The supervisor's settings: defaults, then `WEFT_SUPERVISOR__FIELD`, then flags."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from weft.settings import (
    PREDICTOR,
    SCHEDULER,
    SUPERVISOR,
    SUPERVISOR_PROBES,
    Address,
    ProcessSettings,
    data_dir_field,
)


class SupervisorSettings(ProcessSettings):
    """What is true now: runner leases, the memory picture, overruns. What was: outcomes, usage, keys.

    Each flag can also be set as WEFT_SUPERVISOR__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_SUPERVISOR__", cli_prog_name="weft_supervisor")

    listen: Address = Field(SUPERVISOR, description="gRPC address, HOST:PORT")
    probes: Address = Field(SUPERVISOR_PROBES, description="/healthz /readyz /metrics, HOST:PORT")
    data_dir: Path = data_dir_field("supervisor", "holds weft.sqlite; one supervisor per directory")
    database: str = Field("", description="postgresql://USER:PASSWORD@HOST/DATABASE instead of DATA_DIR/weft.sqlite")
    scheduler: Address = Field(SCHEDULER, description="the scheduler's gRPC address")
    predictor: Address = Field(PREDICTOR, description="the predictor's gRPC address")

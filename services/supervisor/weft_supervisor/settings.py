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
    keys_ms: int = Field(1_000, ge=50, le=60_000, description="PostgreSQL: keys made elsewhere are known after this")
    scheduler: Address = Field(SCHEDULER, description="the scheduler's gRPC address")
    predictor: Address = Field(PREDICTOR, description="the predictor's gRPC address")
    lease_ms: int = Field(2_000, ge=100, le=600_000, description="a runner silent this long is gone")
    report_ms: int = Field(50, ge=1, le=10_000, description="at most one merged report to the scheduler in this time")
    preempt_ms: int = Field(5_000, ge=100, le=600_000, description="a victim still there after this is chosen again")
    keep_days: int = Field(30, ge=1, le=3_650, description="outcomes older than this are deleted; usage stays")

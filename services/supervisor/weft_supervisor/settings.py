"""The supervisor's settings: defaults, then `WEFT_SUPERVISOR__FIELD`, then flags."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from weft.telemetry.probes import split_address


def _address(value: str) -> str:
    split_address(value)  # ValueError with the form that is expected
    return value


Address = Annotated[str, AfterValidator(_address)]


def state_home() -> Path:
    """Weft's data directory when none is given."""
    if explicit := os.environ.get("WEFT_DATA_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "weft"


class Settings(BaseSettings):
    """What is true now: runner leases, the memory picture, overruns. What was: outcomes, usage, keys."""

    model_config = SettingsConfigDict(
        env_prefix="WEFT_SUPERVISOR__", cli_prog_name="weft_supervisor", cli_kebab_case=True, cli_hide_none_type=True
    )

    listen: Address = Field("127.0.0.1:7420", description="gRPC address, HOST:PORT")
    probes: Address = Field("127.0.0.1:7421", description="/healthz /readyz /metrics, HOST:PORT")
    data_dir: Path = Field(state_home() / "supervisor", description="holds weft.sqlite; one supervisor per directory")
    database: str = Field("", description="SQLAlchemy URL instead of DATA_DIR/weft.sqlite")
    scheduler: Address = Field("127.0.0.1:7430", description="the scheduler's gRPC address")
    predictor: Address = Field("127.0.0.1:7410", description="the predictor's gRPC address")
    lease_ms: int = Field(2_000, ge=100, le=600_000, description="a runner silent this long is gone")
    report_ms: int = Field(50, ge=1, le=10_000, description="at most one merged report to the scheduler in this time")
    preempt_ms: int = Field(5_000, ge=100, le=600_000, description="a victim still there after this is named again")
    keep_days: int = Field(30, ge=1, le=3_650, description="outcomes older than this are deleted; usage stays")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"

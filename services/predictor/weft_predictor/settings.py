"""The predictor's settings: defaults, then `WEFT_PREDICTOR__FIELD`, then flags."""

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
    """How long will an answer be: serves calibrated length predictions and learns from outcomes.

    Loads DATA_DIR/model.npz at the start and saves it there while it learns. Offline: `weft_predictor train --help`.
    """

    model_config = SettingsConfigDict(
        env_prefix="WEFT_PREDICTOR__", cli_prog_name="weft_predictor", cli_kebab_case=True, cli_hide_none_type=True
    )

    listen: Address = Field("127.0.0.1:7410", description="gRPC address, HOST:PORT")
    probes: Address = Field("127.0.0.1:7411", description="/healthz /readyz /metrics, HOST:PORT")
    data_dir: Path = Field(state_home() / "predictor", description="where the model is kept")
    model: Path | None = Field(None, description="a trained model to start from while DATA_DIR holds none")
    scale: float = Field(1.0, gt=0, le=1_000, description="multiplies every prediction (experiments)")
    max_context_tokens: int = Field(2_048, ge=10, description="S3's buckets are tenths of this")
    save_outcomes: int = Field(500, ge=1, description="save after that many outcomes ...")
    save_seconds: float = Field(30.0, gt=0, description="... or after that long with something learned")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"

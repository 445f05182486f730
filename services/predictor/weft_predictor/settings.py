"""The predictor's settings: defaults, then `WEFT_PREDICTOR__FIELD`, then flags."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from weft.settings import (
    PREDICTOR,
    PREDICTOR_PROBES,
    Address,
    StandbySettings,
    data_dir_field,
    listen_field,
    probes_field,
)


class PredictorSettings(StandbySettings):
    """Serves calibrated predictions of how long answers will be, and learns from outcomes.

    Loads DATA_DIR/model.npz at the start and saves it there while it learns. Offline: `weft predictor train --help`.

    Each flag can also be set as WEFT_PREDICTOR__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_PREDICTOR__", cli_prog_name="weft_predictor")

    listen: Address = listen_field(PREDICTOR)
    probes: Address = probes_field(PREDICTOR_PROBES)
    data_dir: Path = data_dir_field("predictor", "where the model is kept")
    model: Path | None = Field(
        None,
        description="a trained model, a folder with an encoder, or replay:FILE. It serves while DATA_DIR holds no "
        "model, else once it predicts better than the saved model. Changed files are read again",
    )
    scale: float = Field(1.0, gt=0, le=1_000, description="multiplies every prediction (experiments)")

"""The depot's settings: defaults, then WEFT_DEPOT__FIELD, then flags. Wrong values stop the start, all listed."""

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from weft.settings import Address, ProcessSettings, data_dir_field


class Settings(ProcessSettings):
    """Fetches and verifies adapters and base models, and serves them by digest.

    Each flag can also be set as WEFT_DEPOT__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_DEPOT__", cli_prog_name="weft_depot")

    http: Address = Field("127.0.0.1:8084", description="HOST:PORT of the API and the probes")
    data_dir: Path = data_dir_field("depot", "blobs and what is known of sources")
    file_root: Path | None = Field(
        None, description="the folder that file: URIs are below; unset: file: is refused (SchemeNotAllowed)"
    )
    threads: int = Field(2, ge=1, le=64, description="resolves at the same time; more wait")
    keep_operation_s: float = Field(600, ge=1, description="how long a finished operation is remembered")
    max_adapter_bytes: int = Field(4 << 30, ge=1, description="of all files of one adapter")
    max_model_bytes: int = Field(1 << 40, ge=1, description="of all files of one base model")

    @field_validator("file_root")
    @classmethod
    def _is_folder(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"{value} is not a folder")
        return value

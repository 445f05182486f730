"""The depot's settings: defaults, then WEFT_DEPOT__FIELD, then flags. Wrong values stop the start, all listed."""

import argparse
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from weft.telemetry.probes import split_address


def default_data_dir() -> Path:
    """$WEFT_DATA_DIR, else $XDG_STATE_HOME/weft, else ~/.local/state/weft; the depot's folder in it."""
    if given := os.environ.get("WEFT_DATA_DIR"):
        return Path(given) / "depot"
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "weft" / "depot"


def _address(text: str) -> str:
    split_address(text)
    return text


class Settings(BaseSettings):
    """Every field is a flag; its description is the flag's help."""

    model_config = SettingsConfigDict(env_prefix="WEFT_DEPOT__", extra="forbid", frozen=True)

    http: Annotated[str, AfterValidator(_address)] = Field(
        "127.0.0.1:8084", description="HOST:PORT of the API and the probes"
    )
    data_dir: Path = Field(default_factory=default_data_dir, description="blobs and what is known of sources")
    file_root: Path | None = Field(
        None, description="the folder that file: URIs are below; unset: file: is refused (SchemeNotAllowed)"
    )
    threads: int = Field(2, ge=1, le=64, description="resolves at the same time; more wait")
    keep_operation_s: float = Field(600, ge=1, description="how long a finished operation is remembered")
    max_adapter_bytes: int = Field(4 << 30, ge=1, description="of all files of one adapter")
    max_model_bytes: int = Field(1 << 40, ge=1, description="of all files of one base model")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="DEBUG INFO WARNING ERROR")
    log_format: Literal["text", "json"] = Field("text", description="text for people, json for collectors")

    @field_validator("file_root")
    @classmethod
    def _is_folder(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"{value} is not a folder")
        return value


def parse(argv: list[str] | None) -> Settings:
    """Flags over environment over defaults. Raises pydantic.ValidationError with every wrong value."""
    parser = argparse.ArgumentParser(
        prog="weft_depot",
        description="Fetches and verifies adapters and base models, and serves them by digest.",
        epilog="Each flag can also be set as WEFT_DEPOT__NAME in the environment; a flag wins.",
    )
    for name, field in Settings.model_fields.items():
        default = "" if name == "data_dir" or field.default is None else f" (default {field.default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            metavar="V",
            help=(field.description or "") + default,
        )
    given: dict[str, Any] = vars(parser.parse_args(argv))
    return Settings(**given)

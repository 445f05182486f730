"""The scheduler's settings: defaults < environment (`WEFT_SCHEDULER__FIELD`) < flags. Wrong values are all listed."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from weft.telemetry.probes import split_address
from weft_scheduler.core.values import Config
from weft_scheduler.errors import SettingsError


def _address(value: str) -> str:
    split_address(value)
    return value


def _data_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.environ.get("WEFT_DATA_DIR") or f"{state}/weft").expanduser() / "scheduler"


Address = Annotated[str, AfterValidator(_address)]


class Settings(BaseSettings):
    """One field a flag."""

    model_config = SettingsConfigDict(env_prefix="WEFT_SCHEDULER__", extra="ignore")

    listen: Address = Field("127.0.0.1:7410", description="HOST:PORT for gateways, supervisors and the registry (gRPC)")
    probes: Address = Field("127.0.0.1:7411", description="HOST:PORT for /healthz, /readyz and /metrics (HTTP)")
    data_dir: Path = Field(default_factory=_data_dir, description="where the term is kept; one scheduler owns it")
    assign_ms: int = Field(5000, ge=1, description="an Assign neither started nor reported by then is taken back")
    avoid_ms: int = Field(3000, ge=1, description="a gateway keeps off a runner whose session it lost this long")
    drain_s: int = Field(300, ge=1, description="streams of a deleted or replaced adapter may run on this long")
    absent_ms: int = Field(10000, ge=1, description="a runner that no supervisor reports is gone after this long")
    status_ms: int = Field(200, ge=1, description="statuses to the registry are gathered this long")
    give_back_s: int = Field(60, ge=1, description="idle runners beyond one are kept this long")
    starvation_bound: int = Field(32, ge=0, description="how often a waiting request may be passed by later ones")
    window: int = Field(64, ge=1, description="how many waiting requests may be passed in one look at a queue")
    max_outcomes: int = Field(20000, ge=1, description="outcomes kept until a supervisor has stored them")
    default_output_tokens: int = Field(256, ge=1, description="reserved when nobody predicts and nothing was seen yet")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="least severe event logged")
    log_format: Literal["text", "json"] = Field("text", description="for people or for collectors")

    def config(self) -> Config:
        """What the core is told."""
        return Config(
            assign_s=self.assign_ms / 1000,
            avoid_s=self.avoid_ms / 1000,
            drain_s=float(self.drain_s),
            absent_s=self.absent_ms / 1000,
            status_s=self.status_ms / 1000,
            give_back_s=float(self.give_back_s),
            starvation_bound=self.starvation_bound,
            window=self.window,
            max_outcomes=self.max_outcomes,
            default_output_tokens=self.default_output_tokens,
        )


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Settings of a command line. Raises SettingsError with every wrong value; `--help` exits."""
    flags: dict[str, Any] = vars(_parser().parse_args(argv))
    try:
        return Settings(**flags)
    except ValidationError as error:
        wrong = [f"--{'-'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors()]
        raise SettingsError("\n".join(wrong)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft_scheduler",
        description="Decides which runner serves which request. Gateways, supervisors and the operator connect to it.",
        epilog="Every flag may be given as WEFT_SCHEDULER__FLAG in the environment; flags win.",
        argument_default=argparse.SUPPRESS,
    )
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="VALUE", help=f"{field.description} (default {default})"
        )
    return parser

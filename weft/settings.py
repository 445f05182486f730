"""Settings that the control plane's processes have in common. The runner, without pydantic, has argparse."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from weft import process
from weft.hosts import host_name

# Where each listens by default; probes are one port above. One process of each kind on a machine finds
# the others without a flag.
GATEWAY = "127.0.0.1:8000"
SCHEDULER, SCHEDULER_PROBES = "127.0.0.1:7410", "127.0.0.1:7411"
SUPERVISOR, SUPERVISOR_PROBES = "127.0.0.1:7420", "127.0.0.1:7421"
DEPOT = "127.0.0.1:7430"
PREDICTOR, PREDICTOR_PROBES = "127.0.0.1:7440", "127.0.0.1:7441"
BATCH, BATCH_PROBES = "127.0.0.1:7460", "127.0.0.1:7461"
OPERATOR_PROBES = "0.0.0.0:7451"  # the kubelet asks the pod's address


def _address(value: str) -> str:
    process.split_address(value)  # ValueError with the form that is expected
    return value


def _url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{value!r} is not an http:// or https:// URL")
    return value.rstrip("/")


Address = Annotated[str, AfterValidator(_address)]
Url = Annotated[str, AfterValidator(_url)]
HostName = Annotated[str, AfterValidator(host_name)]


def _comma_list(value: object) -> object:
    """Split `a,b`, or read `["a", "b"]`."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",") if part.strip()]


CommaList = (NoDecode, BeforeValidator(_comma_list))
HostNames = Annotated[list[HostName], *CommaList]


class ProcessSettings(BaseSettings):
    """Defaults, then the environment (`env_prefix`), then flags: every field is one, its description is the help."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, cli_kebab_case=True, cli_hide_none_type=True)

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="least level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="logs for people or for collectors")
    tls_dir: Path | None = Field(
        None, description="tls.crt, tls.key and ca.crt: mutual TLS with Weft's processes; unset: plain text"
    )

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Self:
        """Read settings from a command line (None: this process's). Exits with code 2, every wrong value listed."""
        try:
            return cls(_cli_parse_args=sys.argv[1:] if argv is None else list(argv))  # pyright: ignore[reportCallIssue]
        except ValidationError as error:
            sys.stderr.write(f"{cls.model_config.get('cli_prog_name')}: wrong settings\n{wrong_settings(error)}")
            raise SystemExit(process.EXIT_CANNOT_START) from error

    @model_validator(mode="after")
    def _variables_are_known(self) -> Self:
        """Refuse an environment variable with the prefix of this process that no field has: pydantic ignores it."""
        prefix = self.model_config.get("env_prefix", "").upper()
        names = {f"{prefix}{name}".upper() for name in type(self).model_fields}
        unknown = sorted(
            name for name in os.environ if prefix and name.upper().startswith(prefix) and name.upper() not in names
        )
        if unknown:
            raise ValueError(f"unknown environment variables: {', '.join(unknown)}; --help lists the settings")
        return self


class StandbySettings(ProcessSettings):
    """Settings of a service that may have a standby (`weft.leadership.standby`)."""

    lease: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.-]*/[a-z0-9][a-z0-9.-]*$",
        description="NAMESPACE/NAME of the Lease whose holder acts, while others stand by; unset: this process acts",
    )


def listen_field(default: str) -> Any:
    """The field of the address where a service takes its peers' calls."""
    return Field(default, description="gRPC address, HOST:PORT")


def probes_field(default: str | None, unset: str = "") -> Any:
    """The field of the address that answers the kubelet's probes and scrapes of metrics."""
    return Field(default, description=f"/healthz /readyz /metrics over plain HTTP, HOST:PORT{unset}")


def allowed_hosts_field(condition: str) -> Any:
    """The field of the names under which a server without authentication answers."""
    description = (
        f"{condition}: names that are answered beside localhost and addresses, NAME or *.DOMAIN; '*': every name"
    )
    return Field([], description=description)


def peer_field(default: str, owner: str) -> Any:
    """The field of the address of a service that is called."""
    return Field(default, description=f"the {owner}'s gRPC address, HOST:PORT")


def depot_field() -> Any:
    """The field of the depot's URL."""
    return Field(f"http://{DEPOT}", description="the depot's URL", validate_default=True)


def database_field(file: str) -> Any:
    """The field of the database that takes the place of a file of the data directory."""
    return Field("", description=f"postgresql://USER:PASSWORD@HOST/DATABASE instead of DATA_DIR/{file}")


def data_dir_field(component: str, description: str) -> Any:
    """The field of a data directory. Its help names the rule, not this machine's folder."""

    def default_data_dir() -> Path:
        return process.default_data_dir(component)

    rule = f"unset: $WEFT_DATA_DIR/{component}, else ~/.local/state/weft/{component}"
    return Field(default_factory=default_data_dir, description=f"{description}; {rule}")


def wrong_settings(error: ValidationError) -> str:
    """List wrong settings, a line for each: flag, value, what is wrong."""
    lines: list[str] = []
    for fault in error.errors():
        flag = ".".join(map(str, fault["loc"])).replace("_", "-")
        lines.append(
            f"  --{flag} {fault['input']!r}: {fault['msg']}\n"
            if flag
            else f"  {fault['msg'].removeprefix('Value error, ')}\n"
        )
    return "".join(lines)

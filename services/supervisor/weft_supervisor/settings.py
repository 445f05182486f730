"""The supervisor's settings: defaults, then `WEFT_SUPERVISOR__FIELD`, then flags."""

from pathlib import Path

from pydantic_settings import SettingsConfigDict

from weft.settings import (
    PREDICTOR,
    SCHEDULER,
    SUPERVISOR,
    SUPERVISOR_PROBES,
    Address,
    ProcessSettings,
    data_dir_field,
    database_field,
    listen_field,
    peer_field,
    probes_field,
)


class SupervisorSettings(ProcessSettings):
    """Keeps runners' leases and memory, chooses victims of overruns, and stores outcomes, usage and keys.

    Each flag can also be set as WEFT_SUPERVISOR__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_SUPERVISOR__", cli_prog_name="weft_supervisor")

    listen: Address = listen_field(SUPERVISOR)
    probes: Address = probes_field(SUPERVISOR_PROBES)
    data_dir: Path = data_dir_field("supervisor", "holds weft.sqlite; a single supervisor per directory")
    database: str = database_field("weft.sqlite")
    scheduler: Address = peer_field(SCHEDULER, "scheduler")
    predictor: Address = peer_field(PREDICTOR, "predictor")

"""The operator's settings, and the file of RunnerDefaults named by `--runner-defaults`.

Settings: defaults < environment (`WEFT_OPERATOR__FIELD`) < flags. Wrong values are all listed.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_settings import SettingsConfigDict

from weft.api.fields import LABEL_PATTERN, OBJECT_NAME_PATTERN
from weft.api.servingpool import DISK_PATH_PATTERN
from weft.process import CannotStart
from weft.settings import (
    OPERATOR_PROBES,
    SCHEDULER,
    Address,
    ProcessSettings,
    Url,
    depot_field,
    peer_field,
    probes_field,
)
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import SharedFolders

MAX_NAMESPACE_CHARS = 63
CLAIM_PATTERN = f"{LABEL_PATTERN[:-1]}/{OBJECT_NAME_PATTERN[1:]}"


def _names(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if not all(names) or any(len(name) > MAX_NAMESPACE_CHARS for name in names):
        raise ValueError("not a list of namespaces, A,B,C")
    return ",".join(dict.fromkeys(names))


def _listed(pattern: str, names: str) -> AfterValidator:
    def check(value: str) -> str:
        if wrong := [item for item in value.split(",") if not re.fullmatch(pattern, item)]:
            raise ValueError(f"expected {names}, got {wrong[0]!r}")
        return value

    return AfterValidator(check)


class Settings(ProcessSettings):
    """Brings a cluster to the state in LoRAAdapters and ServingPools. Several replicas may run; one of them leads.

    Each flag can also be set as WEFT_OPERATOR__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_OPERATOR__", cli_prog_name="weft_operator.kubernetes")

    namespace: str = Field(description="namespace of the operator and of its Lease", max_length=MAX_NAMESPACE_CHARS)
    pool_namespaces: Annotated[str, AfterValidator(_names)] = Field(
        description="namespaces allowed for pools, A,B,C: runners are made only in these"
    )
    scheduler: Address = peer_field(SCHEDULER, "scheduler")
    supervisor: Address | None = Field(
        None, description="HOST:PORT of the supervisor, for the keys of APIKeys; unset: keys are not declared"
    )
    key_namespaces: Annotated[str, AfterValidator(_names)] | None = Field(
        None, description="namespaces of served APIKeys, A,B,C: the operator reads and makes Secrets there"
    )
    depot: Url = depot_field()
    model_cache_paths: Annotated[str, _listed(DISK_PATH_PATTERN, "folders, /A,/B, without . and ..")] | None = Field(
        None, description="folders of nodes allowed in modelCache.hostPath of pools, /A,/B; unset: none"
    )
    model_cache_claims: Annotated[str, _listed(CLAIM_PATTERN, "claims, NAMESPACE/NAME,NAMESPACE/NAME")] | None = Field(
        None, description="claims allowed in modelCache of pools, NAMESPACE/NAME,NAMESPACE/NAME; unset: none"
    )
    runner_defaults: Path = Field(description="YAML file: the common parts of this installation's runner pods")
    probes: Address = probes_field(OPERATOR_PROBES)
    webhook: Address | None = Field(None, description="HOST:PORT of the admission webhook (HTTPS); unset: none")
    webhook_tls_dir: Path | None = Field(None, description="folder with tls.crt and tls.key; --webhook needs it")
    lease: str = Field("weft-operator", description="name of the leader's Lease", min_length=1)
    poll_seconds: float = Field(
        0.0, ge=0.0, description="how often hf:, s3:, oci: and https: sources are asked for a new content; 0: never"
    )
    watch_nodes: bool = Field(
        True, description="move runners off unschedulable nodes, for pools with disruptionBudget 0"
    )

    @model_validator(mode="after")
    def _served_with_certificates(self) -> "Settings":
        if self.webhook and self.webhook_tls_dir is None:
            raise ValueError("--webhook needs --webhook-tls-dir")
        return self

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces allowed for serving pools."""
        return tuple(self.pool_namespaces.split(","))

    @property
    def shared_folders(self) -> SharedFolders:
        """The folders allowed in modelCache of pools."""
        paths, claims = (
            value.split(",") if value else () for value in (self.model_cache_paths, self.model_cache_claims)
        )
        return SharedFolders(frozenset(paths), frozenset(claims))

    @property
    def served_key_namespaces(self) -> tuple[str, ...]:
        """The namespaces of the served APIKeys."""
        return tuple(self.key_namespaces.split(",")) if self.key_namespaces else ()


class BadRunnerDefaults(CannotStart):
    """The file of runner defaults is missing, is not YAML, or has an unknown field."""


def read_runner_defaults(path: Path) -> RunnerDefaults:
    """Read the file. Raises BadRunnerDefaults with every wrong field."""
    try:
        document: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRunnerDefaults(f"--runner-defaults {path}: {error}") from error
    if not isinstance(document, dict):
        raise BadRunnerDefaults(f"--runner-defaults {path}: not a mapping of fields")
    return parse_runner_defaults(document, str(path))  # pyright: ignore[reportUnknownArgumentType] (keys are checked below)


def parse_runner_defaults(document: dict[Any, Any], origin: str) -> RunnerDefaults:
    """Read the values of a file. Raises BadRunnerDefaults."""
    fields = {to_camel(name): name for name in RunnerDefaults.__dataclass_fields__}
    unknown = sorted(str(name) for name in document if name not in fields)
    if unknown:
        raise BadRunnerDefaults(f"{origin}: unknown: {', '.join(unknown)}; known: {', '.join(fields)}")
    try:
        return TypeAdapter(RunnerDefaults).validate_python({fields[name]: value for name, value in document.items()})
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise BadRunnerDefaults(f"{origin}: {'; '.join(wrong)}") from error

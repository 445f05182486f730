"""The operator's settings: defaults < environment (`WEFT_OPERATOR__FIELD`) < flags. Wrong values are all listed."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from weft.settings import DEPOT, OPERATOR_PROBES, SCHEDULER, Address, ProcessSettings

NAMESPACE_MAX = 63


def _names(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if not all(names) or any(len(name) > NAMESPACE_MAX for name in names):
        raise ValueError("not a list of namespaces, A,B,C")
    return ",".join(dict.fromkeys(names))


class Settings(ProcessSettings):
    """Brings a cluster to what LoRAAdapters and ServingPools say. Several replicas may run; one leads.

    Each flag can also be set as WEFT_OPERATOR__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_OPERATOR__", cli_prog_name="weft_operator.kubernetes")

    namespace: str = Field(description="the operator's own namespace, where its Lease is", max_length=NAMESPACE_MAX)
    pool_namespaces: Annotated[str, AfterValidator(_names)] = Field(
        description="namespaces that pools may live in, A,B,C: only there runners are made"
    )
    scheduler: Address = Field(SCHEDULER, description="HOST:PORT of the scheduler")
    depot: str = Field(f"http://{DEPOT}", description="URL of the depot", pattern="^https?://")
    runner_defaults: Path = Field(description="YAML file: what runner pods of this installation have in common")
    probes: Address = Field(OPERATOR_PROBES, description="HOST:PORT for /healthz, /readyz and /metrics (HTTP)")
    webhook: Address | None = Field(None, description="HOST:PORT of the admission webhook (HTTPS); unset: none")
    webhook_tls_dir: Path | None = Field(None, description="tls.crt and tls.key of the webhook, which needs them")
    lease: str = Field("weft-operator", description="name of the Lease that the leader holds", min_length=1)
    lease_seconds: float = Field(15.0, ge=1.0, description="a leader that is silent for so long is replaced")
    audit_seconds: float = Field(60.0, gt=0.0, description="how often the watches are compared with lists")
    drain_seconds: float = Field(5.0, ge=0.0, description="after SIGTERM admission is served on for so long")
    kubeconfig: Path | None = Field(None, description="outside of a cluster: the file; unset: the service account")

    @model_validator(mode="after")
    def _served_with_certificates(self) -> "Settings":
        if self.webhook and self.webhook_tls_dir is None:
            raise ValueError("--webhook needs --webhook-tls-dir")
        return self

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that pools may live in."""
        return tuple(self.pool_namespaces.split(","))

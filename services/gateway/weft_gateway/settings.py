"""The gateway's configuration: defaults, then `WEFT_GATEWAY__FIELD`, then flags."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from weft.process import split_address
from weft.settings import (
    GATEWAY,
    PREDICTOR,
    SCHEDULER,
    Address,
    HostNames,
    ProcessSettings,
    Url,
    allowed_hosts_field,
    data_dir_field,
    depot_field,
    peer_field,
    probes_field,
)


def _batch(value: str) -> str:
    if value:
        split_address(value)  # ValueError with the expected form
    return value


class GatewaySettings(ProcessSettings):
    """The OpenAI-compatible gateway: authenticates, tokenises, streams; holds every emitted token.

    Each flag can also be set as WEFT_GATEWAY__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_GATEWAY__", cli_prog_name="weft_gateway")

    http: Address = Field(GATEWAY, description="address for clients, HOST:PORT; port 0 picks a free port")
    probes: Address | None = probes_field(None, unset="; unset: they are on --http only")
    scheduler: Address = peer_field(SCHEDULER, "scheduler")
    predictor: Address = peer_field(PREDICTOR, "predictor")
    depot: Url = depot_field()
    batch: Annotated[str, AfterValidator(_batch)] = Field(
        "", description="the batch service's gRPC address; unset: /v1/files and /v1/batches answer 501"
    )
    store_responses: CliImplicitFlag[bool] = Field(
        True, description="keep responses of /v1/responses, prompts and answers in clear, if --batch is set"
    )
    prefix_sharing: CliImplicitFlag[bool] = Field(
        True, description="with --no-auth, reuse prompts among all callers; the time saved reveals a reuse to them"
    )
    objects: Path | None = Field(
        None, description="the socket of `weft up`'s controller; unset: /v1/load_lora_adapter answers 501"
    )
    adapter_roots: list[Path] = Field(
        [], description="folders of this machine; lora_path of /v1/load_lora_adapter may name folders below them"
    )
    data_dir: Path = data_dir_field("gateway", "for this process only; tokenizers are cached there")
    auth: CliImplicitFlag[bool] = Field(
        True, description="require an API key; each namespace sees only its models and metrics"
    )
    oidc_issuer: str = Field(
        "", description="also take JSON Web Tokens of this OpenID Connect issuer (its URL, as tokens name it)"
    )
    oidc_audience: str = Field("", description="the audience required in tokens; needed with --oidc-issuer")
    oidc_namespace_claim: str = Field(
        "kubernetes.io/namespace", description="the claim with the caller's namespace; / parts a path"
    )
    oidc_jwks_url: str = Field("", description="URL of the issuer's keys; unset: from its discovery document")
    oidc_ca: Path | None = Field(None, description="certificates (PEM) to trust the issuer by; unset: the system's")
    hold_seconds: float = Field(300.0, ge=0.1, le=3600, description="how long a request waits for a runner, in all")
    drain_seconds: float = Field(
        10.0,
        ge=0,
        le=600,
        description="how long running answers may finish after SIGTERM (half of it: open connections are served); after"
        " SIGINT 0.5 s",
    )
    keep_alive_seconds: int = Field(
        120, ge=1, le=3600, description="how long a connection waits for its next request; longer than proxies do"
    )
    max_in_flight: int = Field(2000, ge=1, le=10_000, description="requests at once; beyond it 429 with Retry-After")
    max_body_bytes: int = Field(4 << 20, ge=1024, le=64 << 20, description="of a request's body; beyond it 413")
    cors_origins: list[str] = Field(
        [], description="origins of pages allowed to call the API, as https://app.example.com; '*': any page"
    )
    allowed_hosts: HostNames = allowed_hosts_field("with --no-auth")
    predict_ms: int = Field(50, ge=1, le=5000, description="deadline of a prediction")

    @model_validator(mode="after")
    def _has_audience(self) -> Self:
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError("--oidc-issuer needs --oidc-audience: tokens for further services are refused by it")
        return self

    @field_validator("depot")
    @classmethod
    def _is_secured(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("tls_dir") and not value.startswith("https://"):
            raise ValueError("with --tls-dir the depot is spoken to over https://")
        return value

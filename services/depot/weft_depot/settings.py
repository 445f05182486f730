"""The depot's settings: defaults, then WEFT_DEPOT__FIELD, then flags. Wrong values stop the start, with a list of
all."""

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, DirectoryPath, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from weft.artifacts.errors import Refused
from weft.settings import (
    DEPOT,
    Address,
    CommaList,
    HostNames,
    StandbySettings,
    allowed_hosts_field,
    data_dir_field,
    probes_field,
)
from weft_depot.sources.addresses import split_url


def _checked_url(url: str) -> str:
    try:
        split_url(url, "it:")
    except Refused as error:
        raise ValueError(error.message) from error
    return url.rstrip("/")


def _checked_host(entry: str) -> str:
    _checked_url(entry if "://" in entry else f"http://{entry}")
    return entry


def _checked_registry(entry: str) -> str:
    if "/" in (_checked_host(entry).partition("://")[2] or entry):
        raise ValueError(f"{entry!r} has a path; write HOST, HOST:PORT or http://HOST:PORT")
    return entry


def _checked_web_host(entry: str) -> str:
    if "/" in entry:
        raise ValueError(f"{entry!r} is not a HOST, HOST:PORT or *.DOMAIN")
    _checked_url(f"https://{entry.removeprefix('*.')}")
    return entry


Scheme = Literal["file", "pvc", "hf", "s3", "oci", "https"]
Host = Annotated[str, AfterValidator(_checked_host)]


class DepotSettings(StandbySettings):
    """Fetches and verifies adapters and base models, and serves them by digest.

    Each flag can also be set as WEFT_DEPOT__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_DEPOT__", cli_prog_name="weft_depot")

    http: Address = Field(DEPOT, description="HOST:PORT of the API")
    probes: Address | None = probes_field(None, unset="; unset: they are on --http")
    allowed_hosts: HostNames = allowed_hosts_field("without --tls-dir")
    data_dir: Path = data_dir_field(
        "depot", "blobs and states of sources; with --lease all depots of the Lease share it"
    )
    file_root: DirectoryPath | None = Field(
        None, description="root folder of file: URIs; unset: file: is refused (SchemeNotAllowed)"
    )
    pvc_root: DirectoryPath | None = Field(
        None, description="folder with claims mounted at NAMESPACE/CLAIM; unset: pvc: is refused"
    )
    schemes: Annotated[tuple[Scheme, ...], *CommaList] = Field(
        get_args(Scheme), description="allowed URI schemes: LIST of file, pvc, hf, s3, oci, https"
    )
    secrets: str = Field(
        "none", description="Secrets of credentialsRef: none, kubernetes, or a folder with NAMESPACE/NAME/KEY files"
    )
    config_maps: Literal["none", "kubernetes"] = Field(
        "none", description="ConfigMaps of configMapRef of a chat template: none, or kubernetes"
    )
    hf_endpoint: Annotated[str, AfterValidator(_checked_url)] = Field(
        "https://huggingface.co", description="URL of the hub for hf: URIs"
    )
    s3_endpoints: Annotated[tuple[Host, ...], *CommaList] = Field(
        (), description="allowed values of source.endpoint: LIST of HOST, HOST:PORT or URL; AWS is always allowed"
    )
    s3_region: str = Field("us-east-1", description="region of s3: sources with an endpoint that does not name it")
    oci_registries: Annotated[tuple[Annotated[str, AfterValidator(_checked_registry)], ...], *CommaList] = Field(
        ("docker.io", "ghcr.io", "quay.io"),
        description="allowed registries of oci: URIs: LIST of HOST, HOST:PORT or URL (http:// without TLS)",
    )
    https_hosts: Annotated[tuple[Annotated[str, AfterValidator(_checked_web_host)], ...], *CommaList] = Field(
        (), description="allowed hosts of https: URIs: LIST of HOST, HOST:PORT or *.DOMAIN; unset: https: is refused"
    )

    @model_validator(mode="after")
    def _standby_has_probes(self) -> Self:
        if self.lease and self.probes is None:
            raise ValueError("--lease needs --probes: a standby depot does not listen on --http")
        return self

    @field_validator("secrets")
    @classmethod
    def _is_secrets(cls, value: str) -> str:
        if value not in ("none", "kubernetes") and not Path(value).is_dir():
            raise ValueError(f"{value} is not 'none', 'kubernetes' or an existing folder")
        return value

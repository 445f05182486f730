"""The batch service's settings: defaults, then `WEFT_BATCH__FIELD`, then flags."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from weft.settings import (
    BATCH,
    BATCH_PROBES,
    Address,
    ProcessSettings,
    data_dir_field,
    database_field,
    listen_field,
    probes_field,
)


def _place(value: str) -> str:
    if value and not value.startswith("s3://"):
        raise ValueError(f"{value!r} is not s3://BUCKET/PREFIX")
    return value


class BatchSettings(ProcessSettings):
    """Serves files and batches of tenants (the Batch API), and decides the order of their lines.

    Each flag can also be set as WEFT_BATCH__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_BATCH__", cli_prog_name="weft_batch")

    listen: Address = listen_field(BATCH)
    probes: Address = probes_field(BATCH_PROBES)
    data_dir: Path = data_dir_field("batch", "holds batch.sqlite and files; one batch service per directory")
    database: str = database_field("batch.sqlite")
    files: Annotated[str, AfterValidator(_place)] = Field(
        "", description="s3://BUCKET/PREFIX instead of DATA_DIR/files"
    )
    s3_endpoint: str = Field("", description="URL of a server with the S3 protocol; unset: AWS")
    s3_region: str = Field("us-east-1", description="region of the bucket")
    s3_credentials: Path | None = Field(
        None, description="folder with accessKeyId, secretAccessKey and optionally sessionToken, as of a mounted Secret"
    )
    s3_pod_identity: bool = Field(
        False, description="without keys, use the pod's identity, or the environment's AWS credentials"
    )
    tenant_bytes: int = Field(
        10 << 30, ge=1, description="maximum bytes of all files of a tenant, outputs included, and its stored responses"
    )

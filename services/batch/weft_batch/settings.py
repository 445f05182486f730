"""The batch service's settings: defaults, then `WEFT_BATCH__FIELD`, then flags."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from weft.settings import BATCH, BATCH_PROBES, Address, ProcessSettings, data_dir_field


def _place(value: str) -> str:
    if value and not value.startswith("s3://"):
        raise ValueError(f"{value!r} is not s3://BUCKET/PREFIX")
    return value


class BatchSettings(ProcessSettings):
    """Files and batches of tenants (the Batch API), and whose line runs next.

    Each flag can also be set as WEFT_BATCH__NAME in the environment; a flag wins.
    """

    model_config = SettingsConfigDict(env_prefix="WEFT_BATCH__", cli_prog_name="weft_batch")

    listen: Address = Field(BATCH, description="gRPC address, HOST:PORT")
    probes: Address = Field(BATCH_PROBES, description="/healthz /readyz /metrics, HOST:PORT")
    data_dir: Path = data_dir_field("batch", "holds batch.sqlite and files; one batch service per directory")
    database: str = Field("", description="postgresql://USER:PASSWORD@HOST/DATABASE instead of DATA_DIR/batch.sqlite")
    files: Annotated[str, AfterValidator(_place)] = Field(
        "", description="s3://BUCKET/PREFIX instead of DATA_DIR/files"
    )
    s3_endpoint: str = Field("", description="URL of a server that speaks S3; unset: AWS")
    s3_region: str = Field("us-east-1", description="region of the bucket")
    s3_credentials: Path | None = Field(
        None, description="folder with accessKeyId, secretAccessKey and perhaps sessionToken, as a mounted Secret has"
    )
    s3_pod_identity: bool = Field(
        False, description="without keys: as the pod's identity, or what the environment holds for AWS's clients"
    )
    lines_in_flight: int = Field(2_000, ge=1, le=100_000, description="lines at gateways and on their way to the store")
    max_lines: int = Field(50_000, ge=1, le=10_000_000, description="of one batch")
    max_line_bytes: int = Field(1 << 20, ge=1_024, le=32 << 20, description="of one line of an input file")
    max_file_bytes: int = Field(200 << 20, ge=1, description="of one uploaded file")
    tenant_bytes: int = Field(10 << 30, ge=1, description="of all files of a tenant, outputs included")
    tenant_files: int = Field(1_000, ge=1, description="files of a tenant, outputs included")
    tenant_batches: int = Field(64, ge=1, description="batches of a tenant that have not ended")
    response_hours: int = Field(
        720, ge=1, le=87_600, description="a response of /v1/responses can be continued this long"
    )
    tenant_responses: int = Field(10_000, ge=1, description="responses of a tenant that can be continued: the newest")
    keep_days: int = Field(90, ge=1, le=3_650, description="a batch is listed this long; files stay until deleted")

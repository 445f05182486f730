"""The tables. One metadata for SQLite and PostgreSQL, and a migration in `migrations/versions` for every change.

Times are Unix milliseconds (UTC) in 64-bit integers: exact on both databases, without time zones.
"""

from datetime import date

from sqlalchemy import BigInteger, Boolean, Date, Index, LargeBinary, MetaData, String, Text, false
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# Constraints have names on both databases, so that a later migration can change them.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)


class OutcomeRow(Base):
    """The terminal record of a request (`weft.v1.Outcome` without the prompt's text)."""

    __tablename__ = "outcomes"
    __table_args__ = (Index(None, "stored_unix_ms"),)

    request_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    pool: Mapped[str] = mapped_column(String(320))
    namespace: Mapped[str] = mapped_column(String(253))
    model_name: Mapped[str] = mapped_column(String(512))
    adapter_digest: Mapped[str] = mapped_column(String(80))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    finish_reason: Mapped[str] = mapped_column(String(16))
    error: Mapped[str] = mapped_column(String(512))
    censored: Mapped[bool] = mapped_column(Boolean)
    predicted_p50_tokens: Mapped[int] = mapped_column(BigInteger)
    predicted_p90_tokens: Mapped[int] = mapped_column(BigInteger)
    model_version: Mapped[str] = mapped_column(String(128))
    ttft_ms: Mapped[int] = mapped_column(BigInteger)
    total_ms: Mapped[int] = mapped_column(BigInteger)
    moves: Mapped[int] = mapped_column(BigInteger)
    doublings: Mapped[int] = mapped_column(BigInteger)
    finished_unix_ms: Mapped[int] = mapped_column(BigInteger)
    stored_unix_ms: Mapped[int] = mapped_column(BigInteger)  # by the store's clock, for deletion


class UsageRow(Base):
    """The usage of a model by a namespace on a day (UTC): the sum over its outcomes, each counted once."""

    __tablename__ = "usage"
    __table_args__ = (Index(None, "day", "namespace"),)

    namespace: Mapped[str] = mapped_column(String(253), primary_key=True)
    model_name: Mapped[str] = mapped_column(String(512), primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class KeyUsageRow(Base):
    """The usage of a model by a key on a day (UTC), for requests with a key. `UsageRow` includes them."""

    __tablename__ = "usage_of_keys"
    __table_args__ = (Index(None, "day", "namespace"),)

    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    model_name: Mapped[str] = mapped_column(String(512), primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    namespace: Mapped[str] = mapped_column(String(253))
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class ApiKeyRow(Base):
    """An API key: its SHA-256, never the key. A revoked key stays, so that its id is never used again."""

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "owner"),)

    key_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    namespace: Mapped[str] = mapped_column(String(253))
    note: Mapped[str] = mapped_column(String(256))
    created_unix_ms: Mapped[int] = mapped_column(BigInteger)
    revoked_unix_ms: Mapped[int | None] = mapped_column(BigInteger)
    scope: Mapped[str] = mapped_column(String(16), server_default="inference")
    models: Mapped[str] = mapped_column(Text, server_default="[]")  # JSON: names and patterns; none: every model
    expires_unix_ms: Mapped[int] = mapped_column(BigInteger, server_default="0")  # 0: never
    owner: Mapped[str] = mapped_column(String(128), server_default="")  # the uid of the declaring object, if any
    withdrawn: Mapped[bool] = mapped_column(Boolean, server_default=false())  # revoked by its owner, reversible
    changes: Mapped[int] = mapped_column(BigInteger, server_default="0")  # by its owner so far


class LimitRow(Base):
    """Limits of a key or a namespace, on all models or on models matching `model`; 0: none."""

    __tablename__ = "limits"

    subject: Mapped[str] = mapped_column(String(320), primary_key=True)  # "key/ID" or "namespace/NAME"
    model: Mapped[str] = mapped_column(String(1000), primary_key=True)
    requests_per_minute: Mapped[int] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int] = mapped_column(BigInteger)
    concurrent: Mapped[int] = mapped_column(BigInteger)
    tokens_per_day: Mapped[int] = mapped_column(BigInteger)
    set_unix_ms: Mapped[int] = mapped_column(BigInteger)


class FileRow(Base):
    """A file of a tenant. `state`: "writing", "ready" (the only state visible to its tenant), "deleting"."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "namespace", "created_unix_ms"), Index(None, "state"))

    file_id: Mapped[str] = mapped_column(String(64), primary_key=True)  # also its name in file storage
    namespace: Mapped[str] = mapped_column(String(320))
    filename: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_unix_ms: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))


class BatchRow(Base):
    """A batch. Times are 0 for future events. `ending`: its status once its output is written."""

    __tablename__ = "batches"
    __table_args__ = (Index(None, "namespace", "created_unix_ms"), Index(None, "status"))

    batch_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    namespace: Mapped[str] = mapped_column(String(320))
    input_file_id: Mapped[str] = mapped_column(String(64))
    endpoint: Mapped[str] = mapped_column(String(64))
    completion_window: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16))
    ending: Mapped[str] = mapped_column(String(16))
    output_file_id: Mapped[str] = mapped_column(String(64))
    error_file_id: Mapped[str] = mapped_column(String(64))
    errors: Mapped[str] = mapped_column(Text)  # JSON
    tags: Mapped[str] = mapped_column(Text)  # JSON: the tenant's metadata
    created_unix_ms: Mapped[int] = mapped_column(BigInteger)
    in_progress_unix_ms: Mapped[int] = mapped_column(BigInteger)
    expires_unix_ms: Mapped[int] = mapped_column(BigInteger)
    finalizing_unix_ms: Mapped[int] = mapped_column(BigInteger)
    completed_unix_ms: Mapped[int] = mapped_column(BigInteger)
    failed_unix_ms: Mapped[int] = mapped_column(BigInteger)
    expired_unix_ms: Mapped[int] = mapped_column(BigInteger)
    cancelling_unix_ms: Mapped[int] = mapped_column(BigInteger)
    cancelled_unix_ms: Mapped[int] = mapped_column(BigInteger)
    total: Mapped[int] = mapped_column(BigInteger)
    completed: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    line_index: Mapped[bytes] = mapped_column(
        LargeBinary
    )  # where lines begin in the input (weft_batch.core.input_lines)


class BatchResultRow(Base):
    """A line's result, until the batch's files are written. The key makes a second result of a line change nothing."""

    __tablename__ = "batch_results"

    batch_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    line: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    succeeded: Mapped[bool] = mapped_column(Boolean)  # output file or error file
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    record: Mapped[bytes] = mapped_column(LargeBinary)  # its line of the file


class ResponseRow(Base):
    """A response of `/v1/responses` with its request (JSON of the gateway), until it expires."""

    __tablename__ = "responses"
    __table_args__ = (Index(None, "namespace", "created_unix_ms", "body_bytes"), Index(None, "expires_unix_ms"))

    response_id: Mapped[str] = mapped_column(String(160), primary_key=True)
    namespace: Mapped[str] = mapped_column(String(320))
    previous_id: Mapped[str] = mapped_column(String(160))  # "": it began the conversation
    body: Mapped[bytes] = mapped_column(LargeBinary)
    body_bytes: Mapped[int] = mapped_column(BigInteger)
    created_unix_ms: Mapped[int] = mapped_column(BigInteger)
    expires_unix_ms: Mapped[int] = mapped_column(BigInteger)


class TermRow(Base):
    """The highest term ever seen of a role ("scheduler", "batch"). It only grows."""

    __tablename__ = "terms"

    role: Mapped[str] = mapped_column(String(32), primary_key=True)
    term: Mapped[int] = mapped_column(BigInteger)

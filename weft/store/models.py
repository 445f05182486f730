"""The tables. One metadata for SQLite and PostgreSQL; a migration in `migrations/versions` for every change.

Times are Unix milliseconds (UTC) in 64-bit integers: exact on both databases, no time zones to get wrong.
"""

from datetime import date

from sqlalchemy import BigInteger, Boolean, Date, Index, MetaData, String
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
    """The one terminal record of a request (`weft.v1.Outcome` without the prompt's text)."""

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
    stored_unix_ms: Mapped[int] = mapped_column(BigInteger)  # by the store's clock: what deletion goes by


class UsageRow(Base):
    """What a namespace used of a model on a day (UTC): the sum over its outcomes, each counted once."""

    __tablename__ = "usage"

    namespace: Mapped[str] = mapped_column(String(253), primary_key=True)
    model_name: Mapped[str] = mapped_column(String(512), primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class ApiKeyRow(Base):
    """An API key: its SHA-256, never the key. A revoked key stays, so that its id is never given again."""

    __tablename__ = "api_keys"

    key_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    namespace: Mapped[str] = mapped_column(String(253))
    note: Mapped[str] = mapped_column(String(256))
    created_unix_ms: Mapped[int] = mapped_column(BigInteger)
    revoked_unix_ms: Mapped[int | None] = mapped_column(BigInteger)


class TermRow(Base):
    """The highest term ever seen of a role ("scheduler"); it only grows."""

    __tablename__ = "terms"

    role: Mapped[str] = mapped_column(String(32), primary_key=True)
    term: Mapped[int] = mapped_column(BigInteger)

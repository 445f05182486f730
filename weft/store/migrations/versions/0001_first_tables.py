"""first tables"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("namespace", sa.String(length=253), nullable=False),
        sa.Column("note", sa.String(length=256), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("revoked_unix_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_table(
        "model_versions",
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("first_seen_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("outcomes", sa.BigInteger(), nullable=False),
        sa.Column("uncensored", sa.BigInteger(), nullable=False),
        sa.Column("covered_p90", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_model_versions")),
    )
    op.create_table(
        "outcomes",
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("pool", sa.String(length=320), nullable=False),
        sa.Column("namespace", sa.String(length=253), nullable=False),
        sa.Column("model_name", sa.String(length=512), nullable=False),
        sa.Column("adapter_digest", sa.String(length=80), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=False),
        sa.Column("error", sa.String(length=512), nullable=False),
        sa.Column("censored", sa.Boolean(), nullable=False),
        sa.Column("predicted_p50_tokens", sa.BigInteger(), nullable=False),
        sa.Column("predicted_p90_tokens", sa.BigInteger(), nullable=False),
        sa.Column("model_version", sa.String(length=128), nullable=False),
        sa.Column("ttft_ms", sa.BigInteger(), nullable=False),
        sa.Column("total_ms", sa.BigInteger(), nullable=False),
        sa.Column("moves", sa.BigInteger(), nullable=False),
        sa.Column("doublings", sa.BigInteger(), nullable=False),
        sa.Column("finished_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("stored_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_outcomes")),
    )
    op.create_index(op.f("ix_outcomes_stored_unix_ms"), "outcomes", ["stored_unix_ms"])
    op.create_table(
        "terms",
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("role", name=op.f("pk_terms")),
    )
    op.create_table(
        "usage",
        sa.Column("namespace", sa.String(length=253), nullable=False),
        sa.Column("model_name", sa.String(length=512), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "model_name", "day", name=op.f("pk_usage")),
    )


def downgrade() -> None:
    op.drop_table("usage")
    op.drop_table("terms")
    op.drop_index(op.f("ix_outcomes_stored_unix_ms"), table_name="outcomes")
    op.drop_table("outcomes")
    op.drop_table("model_versions")
    op.drop_table("api_keys")

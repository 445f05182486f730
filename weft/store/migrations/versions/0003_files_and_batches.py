"""files and batches of tenants, results of lines"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("file_id", sa.String(length=64), nullable=False),
        sa.Column("namespace", sa.String(length=320), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("file_id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_namespace_created_unix_ms"), "files", ["namespace", "created_unix_ms"])
    op.create_index(op.f("ix_files_state"), "files", ["state"])
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("namespace", sa.String(length=320), nullable=False),
        sa.Column("input_file_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("ending", sa.String(length=16), nullable=False),
        sa.Column("output_file_id", sa.String(length=64), nullable=False),
        sa.Column("error_file_id", sa.String(length=64), nullable=False),
        sa.Column("errors", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("in_progress_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("finalizing_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("completed_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("failed_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("expired_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("cancelling_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("cancelled_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("line_index", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_batches")),
    )
    op.create_index(op.f("ix_batches_namespace_created_unix_ms"), "batches", ["namespace", "created_unix_ms"])
    op.create_index(op.f("ix_batches_status"), "batches", ["status"])
    op.create_table(
        "batch_results",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "line", name=op.f("pk_batch_results")),
    )


def downgrade() -> None:
    op.drop_table("batch_results")
    op.drop_index(op.f("ix_batches_status"), table_name="batches")
    op.drop_index(op.f("ix_batches_namespace_created_unix_ms"), table_name="batches")
    op.drop_table("batches")
    op.drop_index(op.f("ix_files_state"), table_name="files")
    op.drop_index(op.f("ix_files_namespace_created_unix_ms"), table_name="files")
    op.drop_table("files")

"""responses that later ones continue"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("response_id", sa.String(length=160), nullable=False),
        sa.Column("namespace", sa.String(length=320), nullable=False),
        sa.Column("previous_id", sa.String(length=160), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("body_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("response_id", name=op.f("pk_responses")),
    )
    op.create_index(op.f("ix_responses_expires_unix_ms"), "responses", ["expires_unix_ms"])
    op.create_index(op.f("ix_responses_namespace_created_unix_ms"), "responses", ["namespace", "created_unix_ms"])


def downgrade() -> None:
    op.drop_table("responses")

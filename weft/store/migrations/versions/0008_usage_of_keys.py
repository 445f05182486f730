"""usage of keys by day"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_of_keys",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("model_name", sa.String(length=512), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("namespace", sa.String(length=253), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "model_name", "day", name=op.f("pk_usage_of_keys")),
    )
    op.create_index(op.f("ix_usage_of_keys_day_namespace"), "usage_of_keys", ["day", "namespace"])


def downgrade() -> None:
    op.drop_table("usage_of_keys")

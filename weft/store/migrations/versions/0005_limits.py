"""limits of keys and namespaces"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limits",
        sa.Column("subject", sa.String(length=320), nullable=False),
        sa.Column("model", sa.String(length=1000), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("concurrent", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_day", sa.BigInteger(), nullable=False),
        sa.Column("set_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject", "model", name=op.f("pk_limits")),
    )


def downgrade() -> None:
    op.drop_table("limits")

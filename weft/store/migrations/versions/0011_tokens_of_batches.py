"""reused tokens and tokens of reasoning in the usage of batches"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in ("cached_tokens", "reasoning_tokens"):
        op.add_column("batches", sa.Column(column, sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    for column in ("reasoning_tokens", "cached_tokens"):
        op.drop_column("batches", column)

"""scope, models and expiry of API keys"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("scope", sa.String(length=16), server_default="inference", nullable=False))
    op.add_column("api_keys", sa.Column("models", sa.Text(), server_default="[]", nullable=False))
    op.add_column("api_keys", sa.Column("expires_unix_ms", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    for column in ("expires_unix_ms", "models", "scope"):
        op.drop_column("api_keys", column)

"""keys that objects of a cluster declare"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("owner", sa.String(length=128), server_default="", nullable=False))
    op.add_column("api_keys", sa.Column("withdrawn", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("api_keys", sa.Column("changes", sa.BigInteger(), server_default="0", nullable=False))
    op.create_index(op.f("ix_api_keys_owner"), "api_keys", ["owner"])


def downgrade() -> None:
    op.drop_index(op.f("ix_api_keys_owner"), table_name="api_keys")
    for column in ("changes", "withdrawn", "owner"):
        op.drop_column("api_keys", column)

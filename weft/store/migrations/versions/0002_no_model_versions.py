"""no table of length models: a predictor judges its own"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("model_versions")


def downgrade() -> None:
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

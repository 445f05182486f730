"""an index of usage by day"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(op.f("ix_usage_day_namespace"), "usage", ["day", "namespace"])


def downgrade() -> None:
    op.drop_index(op.f("ix_usage_day_namespace"), table_name="usage")

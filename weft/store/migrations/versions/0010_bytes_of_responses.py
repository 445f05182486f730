"""bytes of a tenant's responses, summed without reading their bodies"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    columns = ["namespace", "created_unix_ms", "body_bytes"]
    op.create_index(op.f("ix_responses_namespace_created_unix_ms_body_bytes"), "responses", columns)
    op.drop_index(op.f("ix_responses_namespace_created_unix_ms"), "responses")


def downgrade() -> None:
    op.create_index(op.f("ix_responses_namespace_created_unix_ms"), "responses", ["namespace", "created_unix_ms"])
    op.drop_index(op.f("ix_responses_namespace_created_unix_ms_body_bytes"), "responses")

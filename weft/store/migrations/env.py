"""Alembic's entry: runs inside the connection and the transaction that `weft.store.migrate` opened."""

from alembic import context

from weft.store.models import Base

connection = context.config.attributes["connection"]
# Batch mode: SQLite changes a column by copying the table; PostgreSQL is not affected.
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_type=True)
with context.begin_transaction():
    context.run_migrations()

"""INSERT .. ON CONFLICT, which SQLite and PostgreSQL share and SQLAlchemy offers per dialect."""

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import DeclarativeBase

Upsert = sqlite.Insert | postgresql.Insert


def insert_into(connection: AsyncConnection, table: type[DeclarativeBase], rows: list[dict[str, Any]]) -> Upsert:
    """An INSERT of `rows` that can be given an ON CONFLICT clause, in the connection's dialect."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).values(rows)
    return sqlite.insert(table).values(rows)

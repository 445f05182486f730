"""Migrations of a database to this version's schema. Every process that opens the store runs them first.

Processes that start together upgrade one after another: the first does the work, the rest find it done.
"""

from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.store.errors import BadMigration, NewerRevision, StoreUnavailable, Unstorable
from weft.store.transactions import transact

Step = Callable[[Config, str], None]
MIGRATION_LOCK = 0x77656674  # "weft": the same number for every version, or two versions would upgrade at once
MIGRATIONS = Path(__file__).parent / "migrations"


async def upgrade(engine: AsyncEngine, target: str = "head", step: Step = command.upgrade) -> str:
    """Upgrade the schema to `target` in one transaction. Return the reached revision ("" for none).

    Raises NewerRevision (nothing changed), BadMigration (rolled back), StoreUnavailable.
    """
    try:
        return await transact(engine, lambda connection: connection.run_sync(_step, target, step))
    except StoreUnavailable as error:
        raise StoreUnavailable(f"cannot open the database {engine.url!r}: {error}") from error
    except (CommandError, SQLAlchemyError, Unstorable) as error:
        raise BadMigration(f"migration to {target!r} failed and was rolled back: {error}") from error


def configuration(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration for the packaged migrations, without a file."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def head() -> str:
    """Return the newest revision known to this version."""
    return ScriptDirectory.from_config(configuration()).get_current_head() or ""


def current(connection: Connection) -> str:
    """Return the database's revision, "" for an empty database."""
    return MigrationContext.configure(connection).get_current_revision() or ""


def _step(connection: Connection, target: str, step: Step) -> str:
    if connection.dialect.name == "postgresql":  # (SQLite's BEGIN IMMEDIATE has locked it)
        connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
    config = configuration(connection)
    scripts, revision = ScriptDirectory.from_config(config), current(connection)
    if revision and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise NewerRevision(revision, scripts.get_current_head() or "")
    step(config, target)
    return current(connection)

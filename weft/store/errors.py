"""Errors of the store.

StoreError
├── NewerRevision   the database was written by a newer Weft: upgrade this version. Nothing was changed
├── BadMigration    a migration failed half-way; the transaction was rolled back
├── BadDatabaseUrl  the URL is not of a supported database
├── Unstorable      the database refuses this row for its content
├── Superseded      another process has taken a newer term: this process may change nothing any more
├── NotPossible     a tenant's request is not possible; the message is for the tenant
│   ├── Absent      no such file or batch of this tenant
│   ├── OverQuota   the tenant has reached its quota
│   └── Conflict    the current state forbids it: a file in use, a finished batch
└── StoreUnavailable  the database cannot be opened or written now (no server): try again later
    ├── StoreFull       its disk is full: make room
    ├── StoreBusy       it answers, but earlier transactions took too long: try again
    └── DatabaseDamaged  SQLite finds its file damaged: it has to be restored
"""


class StoreError(Exception):
    """Root of the store's errors."""


class NewerRevision(StoreError):
    """The database's revision is unknown to this version of Weft."""

    def __init__(self, revision: str, head: str) -> None:
        super().__init__(
            f"the database is at revision {revision!r}, unknown to this version (its newest is {head!r}): "
            "start the newer version, or restore a copy from before the upgrade"
        )
        self.revision, self.head = revision, head


class BadMigration(StoreError):
    """A migration failed and was rolled back."""


class BadDatabaseUrl(StoreError):
    """The URL is not postgresql://USER@HOST/DATABASE. The message omits it: it may hold a password."""


class Unstorable(StoreError):
    """The database refuses a row for its content."""


class Superseded(StoreError):
    """A process with a newer term of the same role has started."""


class NotPossible(StoreError):
    """A tenant's request is not possible. The message is a sentence for the tenant."""


class Absent(NotPossible):
    """The tenant has no such file or batch. Whether another tenant has it is not revealed."""


class OverQuota(NotPossible):
    """The tenant has reached its quota."""


class Conflict(NotPossible):
    """The current state of the file or batch forbids the request."""


class StoreUnavailable(StoreError):
    """The database cannot be opened or written now."""


class StoreFull(StoreUnavailable):
    """The database's disk is full: reads work, writes do not."""


class StoreBusy(StoreUnavailable):
    """The database answers, but earlier transactions took too long."""


class DatabaseDamaged(StoreUnavailable):
    """The content of SQLite's file is damaged."""

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage}: stop the process, put a backup in the file's place, and start it again")

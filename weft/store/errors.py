"""What can go wrong with the store.

StoreError
├── NewerRevision   the database was written by a newer Weft: upgrade this one. Nothing was changed
├── BadMigration    a migration failed half-way; the transaction was rolled back
├── BadDatabaseUrl  the URL names no database that Weft can use
├── Unstorable      the database takes everything but this: the row itself is at fault
├── Superseded      another process has taken a newer term: this one may change nothing any more
├── NotPossible     what a tenant asked for is not possible; the message is for the tenant
│   ├── Absent      no such file or batch of this tenant
│   ├── OverQuota   the tenant has as much as one may
│   └── Conflict    not in the state that it is in: a file in use, a batch that has ended
└── StoreUnavailable  the database cannot be opened or written now (no server): try again later
    ├── StoreFull       its disk is full: make room
    ├── StoreBusy       it answers, but others' transactions were not over in time: try again
    └── DatabaseDamaged  SQLite finds its file damaged: it has to be restored
"""


class StoreError(Exception):
    """Root of the store's errors."""


class NewerRevision(StoreError):
    """The database's revision is unknown to this version of Weft."""

    def __init__(self, revision: str, head: str) -> None:
        super().__init__(
            f"the database is at revision {revision!r}, which this version does not know (its newest is {head!r}): "
            "start the newer version, or restore a copy from before the upgrade"
        )
        self.revision, self.head = revision, head


class BadMigration(StoreError):
    """A migration failed and was rolled back."""


class BadDatabaseUrl(StoreError):
    """The URL is not postgresql://USER@HOST/DATABASE. Its text is not repeated: it may hold a password."""


class Unstorable(StoreError):
    """The database refuses a row for what is in it."""


class Superseded(StoreError):
    """A process with a newer term of the same role has started."""


class NotPossible(StoreError):
    """What a tenant asked for is not possible. The message is a sentence for the tenant."""


class Absent(NotPossible):
    """No such file or batch of this tenant; whether another has it is not said."""


class OverQuota(NotPossible):
    """The tenant has as much as one may."""


class Conflict(NotPossible):
    """The state that it is in does not allow it."""


class StoreUnavailable(StoreError):
    """The database cannot be opened or written now."""


class StoreFull(StoreUnavailable):
    """The database's disk is full: what is stored can be read, and nothing written."""


class StoreBusy(StoreUnavailable):
    """The database answers, but others' transactions were not over in time."""


class DatabaseDamaged(StoreUnavailable):
    """The content of SQLite's file is not what it should be."""

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage}: stop the process, put a backup in the file's place, and start it again")

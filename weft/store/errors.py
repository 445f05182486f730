"""What can go wrong with the store.

StoreError
├── NewerRevision   the database was written by a newer Weft: upgrade this one. Nothing was changed
├── BadMigration    a migration failed half-way; the transaction was rolled back
└── StoreUnavailable  the database cannot be opened or written now (full disk, no server): try again later
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


class StoreUnavailable(StoreError):
    """The database cannot be opened or written now."""

"""Errors of file storage.

StorageError
├── StorageUnavailable  storage cannot be read or written now: try again later
│   └── StorageFull     its disk is full: make room
└── BytesMissing        the file's bytes are missing
"""


class StorageError(Exception):
    """Root of file storage's errors."""


class StorageUnavailable(StorageError):
    """Storage cannot be read or written now."""


class StorageFull(StorageUnavailable):
    """The disk of file storage is full: reads work, writes do not."""


class BytesMissing(StorageError):
    """No bytes are stored under the name."""

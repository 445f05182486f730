"""What can go wrong with file storage.

StorageError
├── StorageUnavailable  it cannot be read or written now: try again later
│   └── StorageFull     its disk is full: make room
└── BytesMissing        the file's bytes are not there
"""


class StorageError(Exception):
    """Root of file storage's errors."""


class StorageUnavailable(StorageError):
    """Storage cannot be read or written now."""


class StorageFull(StorageUnavailable):
    """The disk of file storage is full: what is stored can be read, and nothing written."""


class BytesMissing(StorageError):
    """Nothing of that name is stored."""

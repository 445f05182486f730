"""What can go wrong with file storage.

StorageError
├── StorageUnavailable  it cannot be read or written now (full disk, no server): try again later
└── BytesMissing        the file's bytes are not there
"""


class StorageError(Exception):
    """Root of file storage's errors."""


class StorageUnavailable(StorageError):
    """Storage cannot be read or written now."""


class BytesMissing(StorageError):
    """Nothing of that name is stored."""

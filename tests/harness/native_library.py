"""The native library for modules whose every test needs it."""

import pytest

from weft_kernels.cpu import Library, NativeUnavailable, find_compiler, load


def native_library() -> Library:
    """Skips the module where there is no compiler. Raises NativeUnavailable where there is one, which failed."""
    try:
        return load()
    except NativeUnavailable:
        try:
            find_compiler()
        except NativeUnavailable as unavailable:
            pytest.skip(unavailable.reason, allow_module_level=True)
        raise

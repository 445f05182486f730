"""Names of Kubernetes objects in requests. They become paths and URLs, so each is checked before use."""

import re

from weft.domain.text import quoted

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


def is_namespace(text: str) -> bool:
    """Return whether a text is a DNS label (RFC 1123)."""
    return bool(_LABEL.fullmatch(text))


def is_object_name(text: str) -> bool:
    """Return whether a text is a DNS subdomain (RFC 1123)."""
    return bool(_SUBDOMAIN.fullmatch(text)) and ".." not in text


def quoted_name(namespace: str, name: str) -> str:
    """Return an object's name for messages: `namespace/name`."""
    return quoted(f"{namespace}/{name}", 200).strip("'\"")

"""Trust in servers that are not Weft's own, behind certificates that their owners have made.

From Python 3.13 on a context of the standard library also asks for what RFC 5280 wants of those who issue certificates,
such as an Authority Key Identifier, which many a private CA never wrote. Who issued a certificate, for which name and
until when is checked either way. On every Python the answer is the same here: the form is not asked for, and what is
named as trusted need not be a root.
"""

import ssl
from typing import TypeVar

Context = TypeVar("Context", bound=ssl.SSLContext)


def accept_private_authorities(context: Context) -> Context:
    """Let `context`, which checks whom a certificate is for, take it however its issuer wrote it."""
    context.verify_flags = (context.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN) & ~ssl.VERIFY_X509_STRICT
    return context

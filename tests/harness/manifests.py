"""Manifests that tests write as text."""

from weft.api.manifests import Object, _Reading


def load_text(text: str, *, name: str = "<text>", namespace: str = "default") -> list[Object]:
    """Every object of that text, as `weft.api.manifests.load` reads a file of it. Raises ManifestError."""
    reading = _Reading(namespace)
    reading.text(name, text)
    return reading.result()

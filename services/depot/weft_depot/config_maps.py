"""Chat templates in ConfigMaps of the requesting namespace. Only the depot reads them."""

from typing import Protocol

from weft.artifacts.errors import Reason, Refused
from weft_depot.object_names import is_namespace, is_object_name, quoted_name


class ConfigMaps(Protocol):
    """A source of ConfigMaps. A call blocks, for a bounded time."""

    def read(self, namespace: str, name: str) -> str:
        """Return the text of a ConfigMap's entry chat_template.jinja.

        Raises Refused (ConfigMapMissing, ConfigMapForbidden), Unavailable.
        """
        ...


class NoConfigMaps:
    """A depot without ConfigMaps."""

    def read(self, namespace: str, name: str) -> str:
        raise Refused(
            Reason.CONFIG_MAP_FORBIDDEN,
            f"ConfigMap {quoted_name(namespace, name)} is not read: this depot was started with --config-maps none; "
            "give the text itself (from: Inline), or start it with --config-maps kubernetes",
        )


def check_names(namespace: str, name: str) -> None:
    """Check that both are valid names of a namespace and a ConfigMap, since they become paths. Raises
    Refused(ConfigMapMissing)."""
    if not is_namespace(namespace) or not is_object_name(name):
        raise Refused(Reason.CONFIG_MAP_MISSING, f"{quoted_name(namespace, name)} is not a valid name of a ConfigMap")

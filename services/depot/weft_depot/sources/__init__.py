# pyright: reportUnusedImport=false
"""Sources of artifacts. A scheme is a module here and a line in `weft_depot.main`.

Tests import names only from here: the submodules may change. Sources with a library are imported on first use, for
enabled schemes. So is `uploaded`, which needs the depot's store.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft_depot.sources.addresses import check_address, split_url
from weft_depot.sources.file import FileSource
from weft_depot.sources.folder import RACY_NS
from weft_depot.sources.pvc import PvcSource
from weft_depot.sources.retry_policy import RetryPolicy
from weft_depot.sources.source import ArtifactSource, source_of

if TYPE_CHECKING:
    from weft_depot.sources.hf import HfSource, parse_revision
    from weft_depot.sources.http import Origin, SourceHttp
    from weft_depot.sources.https import HttpsSource, folder_url
    from weft_depot.sources.hub import Hub
    from weft_depot.sources.oci import TITLE, FileLayer, Reference, basic_credentials, parse_manifest, parse_reference
    from weft_depot.sources.s3 import BucketSnapshot, Place, parse_path
    from weft_depot.sources.s3_client import Clients, Endpoints, S3Endpoint, s3_errors
    from weft_depot.sources.uploaded import UploadedSource

_LATER = {
    "hf": "HfSource parse_revision",
    "http": "Origin SourceHttp",
    "https": "HttpsSource folder_url",
    "hub": "Hub",
    "oci": "TITLE FileLayer Reference basic_credentials parse_manifest parse_reference",
    "s3": "BucketSnapshot Place parse_path",
    "s3_client": "Clients Endpoints S3Endpoint s3_errors",
    "uploaded": "UploadedSource",
}


def __getattr__(name: str) -> Any:
    """Import a source on first use. Raises AttributeError."""
    for module, names in _LATER.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(name)

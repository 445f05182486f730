# pyright: reportUnusedImport=false
"""Sources of artifacts. A scheme is one module here and one line in `weft_depot.main`.

Tests take these names from here: the modules behind them may change. Sources that need a library are imported by their
modules, for a scheme that is on; `uploaded` is too, as it needs the depot's own store.
"""

from weft_depot.sources.addresses import check_address, split_url
from weft_depot.sources.file import FileSource
from weft_depot.sources.folder import RACY_NS
from weft_depot.sources.pvc import PvcSource
from weft_depot.sources.retry_policy import RetryPolicy
from weft_depot.sources.source import ArtifactSource, source_of

"""The depot's metrics. Labels are bounded: kinds, states and reasons are short lists."""

from prometheus_client import Counter, Gauge, Histogram

LEADER = Gauge("weft_depot_leader", "1 while this process acts, 0 while it stands by")
RESOLVES = Counter("weft_depot_resolves", "Finished resolves", ["kind", "reason"])  # reason "" = fetched
RESOLVE_SECONDS = Histogram(
    "weft_depot_resolve_seconds",
    "From request to digest or failure",
    ["kind"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
OPERATIONS = Gauge("weft_depot_operations", "Operations remembered", ["state"])
TURNED_AWAY = Counter("weft_depot_turned_away", "Requests answered 429 or 503", ["what"])
BLOB_BYTES_SENT = Counter("weft_depot_blob_sent_bytes", "Bytes of blobs sent")
HOUSEKEEPING_FAILURES = Counter("weft_depot_housekeeping_failures", "Rounds ended early by an error of the disk")
DAMAGED = Counter("weft_depot_damaged_blobs", "Blobs removed because their content did not match their digest")
BLOBS = Gauge("weft_depot_blobs", "Blobs held")
BLOB_BYTES = Gauge("weft_depot_blob_bytes", "Bytes of blobs held")

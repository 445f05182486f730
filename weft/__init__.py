"""The ground of Weft: what every process speaks (resources, wire contracts, artifacts, store, telemetry)."""

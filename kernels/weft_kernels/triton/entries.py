"""Bytes of an adapter's entry in the tables of `tables`, for who plans a GPU's memory without torch."""

HEADER = 4  # numbers of a site's head: where each slice's ranks end, and how many rows of A are here


def entry_bytes(layers: int, sites: int, ranks: int) -> int:
    """The bytes of heads and scales of all sites, and of places of rows. `ranks`: of all projections of a layer."""
    return 4 * layers * 2 * (sites * HEADER + ranks)

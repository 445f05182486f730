"""A module per benchmark: `figures(options, run)` yields its lines. `weft_bench.cases` has its options and page."""

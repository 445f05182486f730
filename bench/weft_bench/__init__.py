"""Benchmarks: `weft bench NAME` measures, keeps raw lines, renders a table; `weft bench check` lists missed targets."""

"""The runner: one process drives one device group. Batches, KV pages, adapters, tokens.

`core/` decides (pure), `model/` computes, `parallel/` splits a model over ranks, `engine/` runs steps; `shell/` has the
engine's thread, the threads that load adapters, and what speaks to gateways, the supervisor and the depot.
"""

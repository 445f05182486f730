"""The runner: one process drives one device group. Batches, KV pages, adapters, tokens.

`core/` decides (pure), `model/` computes, `memory/` holds tensors, `engine.py` is the heartbeat; `server.py`, `wire.py`
and `depot.py` are the shell that speaks to gateways, the supervisor and the depot.
"""

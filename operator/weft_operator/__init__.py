"""The operator: a pure planner, a controller around it, and two shells that carry actions out.

- `core`: `reconcile(ref, state, now) -> actions` and what it decides by. Values in, decisions out.
- `controller`: the work queue and the loop; clients of the depot and of the scheduler's registry.
- `kubernetes`: objects watched with kopf, actions carried out through the API server, one leader.
- `local`: objects in one file, actions carried out with processes of this machine (`weft up`).
"""

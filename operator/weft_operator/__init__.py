"""The operator: a pure planner, a controller around it, and two shells for its actions.

- `core`: `reconcile(ref, state, now) -> actions` and its rules. Values in, decisions out.
- `controller`: the work queue and the loop; clients of the depot and of the scheduler's registry.
- `kubernetes`: watches objects with kopf and sends actions to the API server; one leader.
- `local`: keeps objects in one file and runs processes on this machine (`weft up`).
"""

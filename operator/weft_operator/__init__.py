"""The operator: one pure planner, `plan(desired, observed, now) -> actions`, and the shells that carry actions out.

`resources`, `resolution`, `observe`, `conditions`, `capacity`, `retention`, `actions` and `plan` are pure: values in,
decisions out. `reconcile`, `registry_client` and `depot_client` do the work; `local/` runs it all with processes on one
machine.
"""

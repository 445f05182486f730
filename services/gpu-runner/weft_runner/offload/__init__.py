"""Offloading: more model than memory, by a policy that a linear program finds (FlexGen, sections 4 and 5). Pure.

`policy` and `plan` are what an executor obeys; `machine` what it measured; `costs` what a policy takes of time and of
each tier; `rounding` which matrix lies where; `solver` the search, which alone needs scipy and runs as
`python -m weft_runner.offload`, a process of its own.
"""

"""A rank of a model in a process of its own: `python -m weft_runner.worker`, started by the runner alone."""

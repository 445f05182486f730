"""Make the native runner's steps last longer without computing more, in every Python process that has this folder on
its PYTHONPATH: a quickstart answer takes seconds instead of 40 ms, so that there is a middle to strike in, and the
cores are left to the stack.

WEFT_TEST_STEP_MS and WEFT_TEST_TOKEN_MS: milliseconds of a step, and of each of its tokens.
"""

import os
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

SLOWED = "weft_runner.model.cpu.executor"


class SlowedLoader(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        run = module.CpuExecutor.run
        step_s, token_s = (float(os.environ[f"WEFT_TEST_{name}_MS"]) / 1000 for name in ("STEP", "TOKEN"))

        def slowed(self: Any, step: Any, **options: Any) -> Any:
            computed = run(self, step, **options)
            time.sleep(step_s + token_s * len(step.tokens))  # the step itself, not a wait for something
            return computed

        module.CpuExecutor.run = slowed


class SlowedFinder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != SLOWED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = SlowedLoader(name, spec.origin)
        return spec


if "WEFT_TEST_STEP_MS" in os.environ:
    sys.meta_path.insert(0, SlowedFinder)

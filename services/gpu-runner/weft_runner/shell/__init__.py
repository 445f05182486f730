# pyright: reportUnusedImport=false
"""Sockets, threads and processes around the machine: engine, adapter pool, sessions, depot, supervisor.

Others take these names from here; whatever needs the wire or is a server's is left out.
"""

from weft_runner.shell.adapter_pool import AdapterPool, InSlot
from weft_runner.shell.engine import Engine, EngineThread, Output
from weft_runner.shell.kv_swapper import KvSwapper
from weft_runner.shell.profile import measure_profile
from weft_runner.shell.step_gaps import StepGaps

# pyright: reportUnusedImport=false
"""Pure: events in, effects out; the clock is an argument (seconds, monotonic).

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_supervisor.core.supervisor import LogEvent, Supervisor, SupervisorConfig, runner_peer

# pyright: reportUnusedImport=false
"""The pure part: events in, effects out; the clock is an argument (seconds, monotonic).

Other packages import names from here only: the modules of this package may change.
"""

from weft_supervisor.core.leases import Leases
from weft_supervisor.core.preemption import Preemption, select_victim
from weft_supervisor.core.supervisor import FULL_REPORTS, LogEvent, Supervisor, SupervisorConfig, runner_peer
from weft_supervisor.core.totals import summarize, violation

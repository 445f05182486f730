# pyright: reportUnusedImport=false
"""The local shell: runs the planner's actions as processes on one machine, and keeps objects in one file.

Tests import these names from here, because the submodules may change. `weft up` loads all of them, in most of a second:
other commands import from here inside functions.
"""

from weft_operator.local.admission import Invalid, ObjectAdmission, admit
from weft_operator.local.api import LocalApi, serve
from weft_operator.local.backend import LocalMachine, runner_program
from weft_operator.local.components import Options, choose_addresses, component_programs
from weft_operator.local.logs import MAX_FOLLOW_BYTES, Follower, LogFile, logging_to
from weft_operator.local.objects import HISTORY, ObjectStore, WatchEvent, ref_of
from weft_operator.local.persistence import Durable, open_store, settle_file_root
from weft_operator.local.processes import CHILD, CRASH_LOOP, STABLE_S, ChildProcess, ProcessState, Program, not_ready
from weft_operator.local.sockets import EPHEMERAL_DEFAULT, RANGE_FILE, PortSource, require_free
from weft_operator.local.stack import Stack

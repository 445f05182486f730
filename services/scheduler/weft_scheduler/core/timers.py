"""The kinds of the scheduler's deadlines, and whose each is."""

from enum import StrEnum
from typing import NamedTuple


class TimerKind(StrEnum):
    """Purposes of deadlines, with the meaning of the timer's name. Simultaneous timers run by value."""

    ADAPTER_DRAIN = "adapter_drain"  # pool, adapter: a draining digest's grace or deadline
    ASSIGN_TIMEOUT = "assign_timeout"  # request: not started, or stopping while its gateway is silent
    AVOIDANCE = "avoidance"  # request: a runner that it avoids may be used again
    BATCH_HEADROOM = "batch_headroom"  # pool: interactive arrivals may need less of the room that batch requests leave
    CANARY_STATUS = "canary_status"  # adapter uid: how its canary's requests ended may be published again
    CLASS_WAIT = "class_wait"  # request: it need not wait for its numerics class any longer
    CONSOLIDATION = "consolidation"  # pool: a lightly loaded runner may be emptied
    FIRST_ROUTES = "first_routes"  # the route table is published without the keys
    GATEWAY_AVOIDANCE = "gateway_avoidance"  # gateway: a runner that its requests avoid may be used again
    KEYS_UNCONFIRMED = "keys_unconfirmed"  # no supervisor has confirmed the API keys for too long
    MIGRATION = "migration"  # pool: what runs on runners that should go may move
    RESUBMIT = "resubmit"  # gateway: it counts as complete
    ROLES = "roles"  # pool: the roles of its runners may change
    RUNNER_CHECKED = "runner_checked"  # runner uuid: no gateway that checks it has found it alive
    RUNNER_LAPSED = "runner_lapsed"  # runner uuid: what was reported before its contact lapsed is too old
    RUNNER_UNREPORTED = "runner_unreported"  # runner uuid: no supervisor reports it
    SCALE = "scale"  # pools that have changed are scaled, before their statuses are published
    SCALE_DOWN = "scale_down"  # pool: a surplus has lasted long enough
    SLO_STATUS = "slo_status"  # pool: its attainment, or its roles, may be published again
    STARTUP_GRACE = "startup_grace"  # the cluster has had the time to report itself
    STATUS = "status"  # gathered statuses are published


class Timer(NamedTuple):
    kind: TimerKind
    name: str = ""
    adapter: str = ""

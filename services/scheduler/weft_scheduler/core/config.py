"""Limits and times of the scheduler's core: constants, but for `keys_grace_s`, which an installation may set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and times, in seconds unless the name has another unit."""

    # An Assign neither started nor reported in this time is taken back: as long as a gateway tries to reach a runner.
    assign_s: float = 5.0
    # A gateway's requests avoid a runner whose session it lost, longer each time: past the runner's lease (2 s), after
    # which one that is gone is known to be.
    avoid_s: float = 3.0
    # Streams of a replaced or deleted digest may run on this long where a pool sets no time: an answer of a few
    # thousand tokens ends within it.
    drain_s: float = 300.0
    # A runner that no supervisor reports is gone after this long: a supervisor that is started again reports sooner.
    absent_s: float = 10.0
    # Without any supervisor a runner is placed on by its last report for this long. Its capacity is that report's less
    # what was assigned since, so it only shrinks; one that is gone is found by the gateways, whose requests avoid it.
    lapsed_s: float = 60.0
    # Gateways say within this time whether a runner whose lease ran out is alive: they ask it, and wait for a second.
    check_s: float = 2.0
    # A request with tokens waits this long for a runner of their numerics class: its answer stays bit-equal there, and
    # after that a slightly other one is better than none.
    same_class_s: float = 5.0
    no_capacity_s: float = 0.1  # a request first avoids a runner that had no capacity this long; doubles up to assign_s
    first_routes_s: float = 2.0  # the first route table waits this long for the API keys
    keys_grace_s: float = 600.0  # API keys that no supervisor has confirmed for this long are refused; 0: never
    keys_lapse_s: float = 10.0  # a version of the keys that nobody confirms for this long gives way to a lower one
    # Statuses to the registry are gathered this long: a burst is one write of an object, and nobody sees the delay.
    status_s: float = 0.2
    slo_status_s: float = 60.0  # a pool's status has its attainment anew at most this often
    canary_status_s: float = 5.0  # how a canary's requests ended is published at most this often
    status_batch: int = 2_000  # adapter statuses of one publication: a stream's queue holds ten times as many messages
    # Runners that are needed no more are wanted this long all the same, where a pool sets no time: twice as long
    # as a new one takes to come (`work_s`), so that a short lull costs none.
    give_back_s: float = 60.0
    work_s: float = 30.0  # queued work should be done within this time: about as long as a new runner takes to come
    route_grace_s: float = 5.0  # a draining digest is still accepted this long from gateways with an older route table
    starvation_bound: int = 32  # how often a waiting request may be overtaken
    max_migrations: int = 8  # epochs of a request that may fail: one more, and it does (a runner that it kills is lost)
    max_preemptions: int = 8  # how often a request may be preempted, on all runners together
    window: int = 64  # how many waiting requests may block in one scheduling pass: it bounds what a pass costs
    # Outcomes kept until a supervisor has stored them; a supervisor's hello is answered with all of them at once.
    max_outcomes: int = 20_000
    # Reserved without a prediction and before the first outcome: a usual answer; a longer one gets more as it grows.
    default_output_tokens: int = 256
    quantile: float = 0.9
    skip_limit: int = 64  # avoided runners passed in one decision
    length_adapters: int = 10_000  # adapters whose output lengths are remembered
    consolidation_s: float = 10.0  # at most one runner of a pool is emptied in this time; what ends within it stays
    kv_bytes_per_s: float = 1e9  # rate of KV between two runners, where one of them has not measured its own rate

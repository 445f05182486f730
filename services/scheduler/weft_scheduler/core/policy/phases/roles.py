"""The roles of a pool's runners (Splitwise, section 4.2); `README.md` in this folder has the rules and the reasons."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.placement.splitwise import KvDomain

PERIOD_S = 60.0  # time between two reviews of how many runners are for prompts: answers change by the hour
REVIEW_S = 0.25  # time between two reviews of the queue, while requests wait or runners are mixed
GROW_S = 0.5  # time between two runners that become mixed: by then the one before has taken its share of the queue
SHRINK_S = 5.0  # time in which nothing has waited before a mixed runner goes back
MARGIN = 0.75  # part of a runner: the wanted number of prompt runners differs by more before one changes its role
REPLANNED = 64  # runners: more are not compared because one came, it joins the side that lacks one
LOST_IN_A_ROW = 3  # times that transfers were lost, after which no phases are split for a while
LOST_TOGETHER_S = 1.0  # a stream or a runner that ends takes all of its transfers with it: that is once
SUSPEND_S = 10.0  # time of the first suspension; doubles each time
MAX_SUSPEND_S = 300.0
PROMPT_PRIOR, OUTPUT_PRIOR = 1020, 129  # tokens of a request before the first one: Splitwise's conversation trace
MEMORY = 64  # requests that the expected lengths remember


class PhaseRunner(NamedTuple):
    """A runner that takes something new now or soon, as the choice of roles sees it.

    `prompt_s`, `token_s`: seconds of it that a token of that phase takes; equal in both where not measured.
    """

    uuid: str
    domain: KvDomain
    preferred: RunnerRole | None
    prompt_s: float
    token_s: float
    pending_prompt_tokens: int = 0
    queue_open: bool = True  # it takes more prompts
    reserved_share: float = 0.0  # share of its memory


class ExpectedWork:
    """Tokens of a request in each phase: the mean of the latest requests."""

    def __init__(self) -> None:
        self.prompt_tokens, self.output_tokens = float(PROMPT_PRIOR), float(OUTPUT_PRIOR)
        self.requests = 0

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count an arrived request with an answer of about `output_tokens`."""
        self.requests += 1
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / MEMORY
        self.output_tokens += (output_tokens - self.output_tokens) / MEMORY


class RolePlan:
    """The roles of one pool's runners. `base`: roles without load; `mixed`: runners for both phases, for now.

    Of each phase one runner is never mixed, where there are two: some prompt never meets some stream.
    """

    def __init__(self) -> None:
        self.base: dict[str, RunnerRole] = {}
        self.mixed: dict[str, None] = {}  # uuids in the order in which they became so
        self.work = ExpectedWork()
        self.prompt_share = 0.5  # share of prompts in the runners' time that requests take, as last planned
        self.suspended_until = 0.0
        self._lost, self._suspend_s = 0, SUSPEND_S
        self._lost_s = float("-inf")  # time of the last loss that was counted
        self._planned_s = float("-inf")
        self._planned_requests = 0  # requests that had come by then
        self._grown_s = float("-inf")
        self._pressed_s = float("-inf")  # the latest time that something waited

    def role_of(self, uuid: str) -> RunnerRole:
        """Return the present role of a runner."""
        return RunnerRole.MIXED if uuid in self.mixed else self.base.get(uuid, RunnerRole.MIXED)

    def next_review(self, now: float, *, waiting: bool) -> float | None:
        """Return when `review` may change something next, in seconds; None: not before something else changes."""
        if now < self.suspended_until:
            return self.suspended_until
        if waiting or self.mixed:
            return now + REVIEW_S
        if self.work.requests == self._planned_requests:
            return None  # what is expected of a request is what it was
        if self._planned_s == float("-inf"):
            return now + REVIEW_S
        periods = max(1, math.ceil((now - self._planned_s) / PERIOD_S))
        return max(now + REVIEW_S, self._planned_s + periods * PERIOD_S)

    @property
    def reason(self) -> str:
        """Reason in words for the number of runners in each role."""
        if self.suspended_until:
            return "transfers of KV failed: no phases are split for a while"
        if not self.base:
            return "no two runners can send KV to each other"
        prompt, output = round(self.work.prompt_tokens), round(self.work.output_tokens)
        lengths = f"by requests of about {prompt} tokens of prompt and {output} of answer, and measured speeds"
        return f"{lengths}; {len(self.mixed)} do both while requests wait" if self.mixed else lengths

    # ------------------------------------------------------------ who is there

    def plan(self, runners: Sequence[PhaseRunner], now: float) -> None:
        """Plan again after runners came or went. Each domain of two or more gets at least a runner for each phase."""
        present = {runner.uuid for runner in runners}
        self.base = {uuid: role for uuid, role in self.base.items() if uuid in present}
        self.mixed = {uuid: None for uuid in self.mixed if uuid in present}
        if now < self.suspended_until:
            self.base, self.mixed = {}, {}
            return
        if self._planned_s == float("-inf"):
            self._planned_s = now
        self.prompt_share = self._prompt_share(runners)
        for members in _domains(runners):
            if len(members) > REPLANNED and self._has_both(members):
                self._join(members)
            else:
                self._plan_domain(members)
            self._keep_both(members)

    def review(self, runners: Sequence[PhaseRunner], now: float, *, waiting: bool) -> None:
        """Review the roles: by the expected work once a period, by what waits at any time.

        `waiting`: requests wait for a runner.
        """
        if now < self.suspended_until:
            return
        if now >= self._planned_s + PERIOD_S:
            self._planned_s, self._planned_requests = now, self.work.requests
            self.prompt_share = self._prompt_share(runners)
            for members in _domains(runners):
                self._plan_domain(members)
        if waiting:
            self._pressed_s = now
        if waiting and now >= self._grown_s + GROW_S:
            self._grow(runners, now)
        elif not waiting and self.mixed and now >= self._pressed_s + SHRINK_S:
            self._shrink(runners)

    # ------------------------------------------------------------ transfers

    def handed_off(self) -> None:
        """Record that KV has moved between two runners."""
        self._lost, self._suspend_s = 0, SUSPEND_S

    def lost(self, now: float) -> bool:
        """Count a failed transfer. True if no phases are split from now on: repeated failures share a cause."""
        if now < self._lost_s + LOST_TOGETHER_S:
            return False
        self._lost, self._lost_s = self._lost + 1, now
        if self._lost < LOST_IN_A_ROW or now < self.suspended_until:
            return False
        self._lost = 0
        self.suspended_until = now + self._suspend_s
        self._suspend_s = min(MAX_SUSPEND_S, 2 * self._suspend_s)
        return True

    def resumes(self, now: float) -> bool:
        """Return whether phases are split again from this moment on."""
        if not 0 < self.suspended_until <= now:
            return False
        self.suspended_until = 0.0
        return True

    # ------------------------------------------------------------ how many

    def _plan_domain(self, members: Sequence[PhaseRunner]) -> None:
        """Divide a domain: as many prompt runners as now, unless the wanted number differs by more than a margin."""
        if len(members) < 2 or not all(runner.domain.kv_layout for runner in members):
            for runner in members:
                self.base.pop(runner.uuid, None)
                self.mixed.pop(runner.uuid, None)
            return
        count = self._prompt_count(members)
        order = sorted(members, key=self._suits_prompts)
        for number, runner in enumerate(order):
            self.base[runner.uuid] = RunnerRole.PROMPT if number < count else RunnerRole.TOKEN

    def _prompt_count(self, members: Sequence[PhaseRunner]) -> int:
        n = len(members)
        # a group's preferred role is kept wherever one is left for the other phase
        min_prompt = max(1, min(n - 1, sum(r.preferred is RunnerRole.PROMPT for r in members)))
        max_prompt = min(n - 1, max(min_prompt, n - sum(r.preferred is RunnerRole.TOKEN for r in members)))
        wanted_prompt = n * self._prompt_share(members)
        present = sum(self.base.get(runner.uuid) is RunnerRole.PROMPT for runner in members)
        has_roles = any(runner.uuid in self.base for runner in members)
        keeps_roles = has_roles and abs(wanted_prompt - present) <= MARGIN
        return min(max_prompt, max(min_prompt, present if keeps_roles else round(wanted_prompt)))

    def _prompt_share(self, members: Sequence[PhaseRunner]) -> float:
        """Return the share of the prompt in the time that a request takes of all runners."""
        prompt_s = self.work.prompt_tokens * sum(r.prompt_s for r in members)
        token_s = self.work.output_tokens * sum(r.token_s for r in members)
        return prompt_s / (prompt_s + token_s) if prompt_s + token_s else 0.5

    def _suits_prompts(self, runner: PhaseRunner) -> tuple[int, bool, float, str]:
        """Return a key, the smaller the earlier for prompts: by group, then as it is, then by what it is fast at."""
        rank = (RunnerRole.PROMPT, None, RunnerRole.TOKEN).index(runner.preferred)
        ratio = runner.prompt_s / runner.token_s
        return rank, self.base.get(runner.uuid) is not RunnerRole.PROMPT, ratio, runner.uuid

    def _has_both(self, members: Sequence[PhaseRunner]) -> bool:
        return {RunnerRole.PROMPT, RunnerRole.TOKEN} <= {self.base.get(runner.uuid) for runner in members}

    def _join(self, members: Sequence[PhaseRunner]) -> None:
        """Let new runners of a large domain join the side without a runner, or the side of their group."""
        prompts = sum(self.base.get(runner.uuid) is RunnerRole.PROMPT for runner in members)
        wanted_prompt = len(members) * self._prompt_share(members)
        for runner in members:
            if runner.uuid not in self.base:
                role = runner.preferred or (RunnerRole.PROMPT if prompts < wanted_prompt else RunnerRole.TOKEN)
                self.base[runner.uuid] = role
                prompts += role is RunnerRole.PROMPT

    # ------------------------------------------------------------ the mixed set

    def _grow(self, runners: Sequence[PhaseRunner], now: float) -> None:
        """Let one more runner be mixed, from the side with a surplus."""
        prompts_fit = any(r.queue_open for r in runners if self.role_of(r.uuid) is not RunnerRole.TOKEN)
        side = RunnerRole.PROMPT if prompts_fit else RunnerRole.TOKEN
        spare: list[PhaseRunner] = []
        for members in _domains(runners):
            of_side = [runner for runner in members if self.role_of(runner.uuid) is side]
            if len(of_side) > 1:
                spare += of_side
        if spare:
            mixed = min(spare, key=lambda r: (r.pending_prompt_tokens, r.reserved_share, r.uuid))
            self.mixed[mixed.uuid] = None
            self._grown_s = now

    def _shrink(self, runners: Sequence[PhaseRunner]) -> None:
        """Let the runner with the longest mixed time return to its role, if the rest can take its second phase."""
        by_uuid = {runner.uuid: runner for runner in runners}
        for uuid in [*self.mixed]:
            runner = by_uuid.get(uuid)
            if runner is not None and self._can_do_without(runner, runners):
                del self.mixed[uuid]
                return

    def _can_do_without(self, runner: PhaseRunner, runners: Sequence[PhaseRunner]) -> bool:
        peers = [r for r in runners if r.uuid != runner.uuid and r.domain == runner.domain]
        if self.base.get(runner.uuid) is RunnerRole.TOKEN:  # it leaves prompts to the others
            return any(r.queue_open for r in peers if self.role_of(r.uuid) is not RunnerRole.TOKEN)
        return any(r.reserved_share <= 0.5 for r in peers if self.role_of(r.uuid) is not RunnerRole.PROMPT)

    def _keep_both(self, members: Sequence[PhaseRunner]) -> None:
        """Keep one runner of each side unmixed, after a runner has left."""
        for side in (RunnerRole.PROMPT, RunnerRole.TOKEN):
            of_side = [runner.uuid for runner in members if self.base.get(runner.uuid) is side]
            mixed = [uuid for uuid in self.mixed if uuid in of_side]
            if mixed and len(mixed) == len(of_side):
                del self.mixed[mixed[0]]


def _domains(runners: Iterable[PhaseRunner]) -> Iterable[list[PhaseRunner]]:
    """Return the runners by domain of KV exchange, in a fixed order."""
    domains: dict[KvDomain, list[PhaseRunner]] = {}
    for runner in sorted(runners, key=lambda runner: runner.uuid):
        domains.setdefault(runner.domain, []).append(runner)
    return domains.values()

"""Runners of a pool over groups whose hardware is for one phase: how many of each, and who goes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.domain.routes import PhaseCounts, PhaseGroups
from weft.domain.runner import RunnerRole

MARGIN = 0.75  # part of a runner, as of the roles: what is spare changes its group for no less
PHASES = ("prompt", "token")


class VictimCandidate(NamedTuple):
    """A runner that could be released. The smallest goes first: idle, then by its load, then the newest."""

    working_set: int
    minus_arrival: int
    uuid: str
    role: RunnerRole = RunnerRole.MIXED  # its role without load
    group: str = "any"  # the phase of its group


def divide(total: int, demand: PhaseCounts, prompt_share: float, previous: PhaseCounts) -> PhaseCounts:
    """Divide `total` runners by phase: the demand of each phase, and spare runners by the share of prompts in the work.

    Where fewer than demanded may be had both sum to more. `previous`: the last answer, kept within a margin.
    """
    spare = max(0, total - demand.prompt - demand.token)
    prompt = demand.prompt + spare * prompt_share
    is_kept = previous.prompt + previous.token == total and abs(prompt - previous.prompt) <= MARGIN
    prompts = previous.prompt if is_kept else round(prompt)
    return PhaseCounts(prompts, max(demand.token, total - prompts))


def allocate(total: int, target: PhaseCounts, groups: Sequence[PhaseGroups]) -> PhaseCounts:
    """Return `total` runners by groups: each group's minimum, then what each phase wants, then groups for any.

    The phase that has the smaller part of what it wants comes first: both get a runner before one gets two. Where a
    phase's own groups have no room those for any have; without any room the last group grows: a sum is never smaller.
    """
    if not groups:
        return PhaseCounts(any=total)
    max_runners = {group.phase.value: group.max_runners or total for group in groups}
    counts, wanted_of = Counter[str](), target._asdict()
    for group in groups:
        counts[group.phase.value] = min(group.min_runners, total - counts.total())
    for _ in range(total - counts.total()):
        short = [phase for phase in PHASES if counts[phase] < min(wanted_of[phase], max_runners.get(phase, 0))]
        if short:
            counts[min(short, key=lambda phase: counts[phase] / wanted_of[phase])] += 1
        else:
            growable = (phase for phase in ("any", *PHASES) if counts[phase] < max_runners.get(phase, 0))
            counts[next(growable, groups[-1].phase.value)] += 1
    return PhaseCounts(counts["prompt"], counts["token"], counts["any"])


def surplus(present: PhaseCounts, target: PhaseCounts) -> PhaseCounts:
    """Return the number of runners to remove from each group: the total surplus, and one more if a group lacks a
    runner.

    So a phase gives its runners to the other one by one, each after the last has come.
    """
    excess = [max(0, n - bound) for n, bound in zip(present, target, strict=True)]
    over = sum(present) - sum(target)
    left = over + 1 if over >= 0 else 0
    removed = list[int]()
    for number in excess:
        removed.append(min(number, left - sum(removed)))
    return PhaseCounts(*removed)


def select_victims(
    candidates: Iterable[VictimCandidate], retained: Sequence[str], going: PhaseCounts, phases: PhaseCounts
) -> list[str]:
    """Return the victims in the order of leaving: possible `retained` victims, then the smallest runners of each group.

    Where there is a choice none whose role would have fewer left than `phases` wants of it; never the last one of a
    role while another one can go.
    """
    everyone = sorted(candidates)
    by_uuid = {candidate.uuid: candidate for candidate in everyone}
    left, roles = going._asdict(), Counter(candidate.role for candidate in everyone)
    victims = dict[str, None]()

    def take(candidate: VictimCandidate) -> None:
        victims[candidate.uuid] = None
        left[candidate.group] -= 1
        roles[candidate.role] -= 1

    for uuid in retained:
        if (candidate := by_uuid.get(uuid)) is not None and left[candidate.group]:
            take(candidate)
    target = {RunnerRole.PROMPT: phases.prompt, RunnerRole.TOKEN: phases.token, RunnerRole.MIXED: 0}
    for floor in (target, dict.fromkeys(target, 0)):
        for candidate in everyone:
            if (
                left[candidate.group]
                and candidate.uuid not in victims
                and roles[candidate.role] > floor[candidate.role]
            ):
                take(candidate)
    for last in (by_uuid[uuid] for uuid in [*victims] if uuid not in retained):
        spare = (c for c in everyone if c.group == last.group and c.uuid not in victims and roles[c.role] > 1)
        if not roles[last.role] and (spare_runner := next(spare, None)) is not None:
            del victims[last.uuid]
            roles[last.role] = 1
            take(spare_runner)
    return [*victims]

"""What becomes of what workers tell: figures go into their file at once, checks into a table."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from weft_bench.gpu_messages import Ended, Hello, Message, Outcome, Told, share_of
from weft_bench.gpu_page import raw_path, write_page
from weft_bench.gpu_plan import Plan
from weft_bench.lines import Line, Origin, append

DOCS = Path("docs/benchmarks")


class Keeper:
    """Figures: written and said as they come; where a case ends, the rows that it did not measure are written, too."""

    def __init__(self, plan: Plan, docs: Path | None) -> None:
        """`docs` None: nothing is kept."""
        self._plan, self._docs = plan, docs
        self._origin: Origin | None = None
        self._lines: list[Line] = []
        self._ended: list[Ended] = []
        if docs is not None and not raw_path(docs).exists() and raw_path(DOCS).exists():
            raw_path(docs).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(raw_path(DOCS), raw_path(docs))  # what comes back from another machine is whole

    def take(self, message: Message) -> None:
        match message:
            case Hello(origin):
                self._origin = origin
                print(f"{origin.machine}; {origin.versions}", flush=True)
            case Told(line):
                self._keep(line)
                print(f"  {said(line)}", flush=True)
            case Ended():
                self._end(message)
            case Outcome():
                raise AssertionError(message)

    def close(self, left: Iterable[str]) -> None:
        """Cases that were not begun have no figures either."""
        for name in left:
            self._end(Ended(name, 0.0, "it was not begun"))
        if self._docs is not None:
            print(f"page: {write_page(self._docs)}", flush=True)

    def told(self) -> int:
        """A summary; the exit code."""
        print()
        for ended in self._ended:
            print(f"{ended.name:10} {ended.seconds:6.1f} s  {last_line(ended.error) or 'done'}")
        missed = [line for line in self._lines if line.target is not None and line.met is not True]
        aimed = sum(line.target is not None for line in self._lines)
        print(f"{aimed - len(missed)} of {aimed} aims are met" + (":" if missed else ""))
        for line in missed:
            print(f"  missed: {said(line)}")
        return 1 if any(ended.error for ended in self._ended) else 0

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)
        print(f"{ended.name}: {ended.seconds:.1f} s" + (f", {ended.error}" if ended.error else ""), flush=True)
        told = {(line.case, line.metric) for line in self._lines}
        for row in self._plan.rows(ended.name):
            if (row.case, row.metric) not in told and self._origin is not None:
                self._keep(self._origin.line(row.case, row.metric, None, row.unit, target=row.target))
        if self._docs is not None:
            write_page(self._docs)

    def _keep(self, line: Line) -> None:
        self._lines.append(line)
        if self._docs is not None:
            append(raw_path(self._docs), [line])


class Table:
    """Checks: failures as they come, a line a group, and at the end all of it once more."""

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []
        self._ended: list[Ended] = []
        self._greeted = False

    def take(self, message: Message) -> None:
        match message:
            case Hello(origin):
                if not self._greeted:
                    print(f"{origin.machine}; {origin.versions}", flush=True)
                self._greeted = True
            case Outcome():
                self._outcomes.append(message)
                if message.fault:
                    print(f"WRONG {message.group}: {message.name}: {message.fault}", flush=True)
            case Ended():
                self._ended.append(message)
                print(self._row(message), flush=True)
            case Told():
                raise AssertionError(message)

    def told(self, left: Iterable[str]) -> int:
        """The table, then every failure; the exit code. `left`: groups that were not begun."""
        self._ended += [Ended(name, 0.0, "it was not begun") for name in left]
        wrong = [outcome for outcome in self._outcomes if outcome.fault]
        broken = [ended for ended in self._ended if ended.error]
        print("\n" + "\n".join(map(self._row, self._whole())))
        for outcome in wrong:
            print(f"\n{outcome.group}: {outcome.name}\n  {outcome.fault}")
        for ended in broken:
            print(f"\n{ended.name} broke off: {ended.error}")
        verdict = f"{len(wrong)} checks failed, {len(broken)} groups broke off"
        print(f"\n{verdict if wrong or broken else f'all {len(self._outcomes)} checks passed'}")
        return 1 if wrong or broken or not self._outcomes else 0

    def _whole(self) -> list[Ended]:
        """Groups, their shares put together."""
        found: dict[str, Ended] = {}
        for ended in self._ended:
            group, before = share_of(ended.name)[0], found.get(share_of(ended.name)[0], Ended("", 0.0))
            found[group] = Ended(group, before.seconds + ended.seconds, before.error or ended.error)
        return list(found.values())

    def _row(self, ended: Ended) -> str:
        """Of a group, or of a share."""
        mine = [outcome for outcome in self._outcomes if ended.name in (outcome.group, share_of(outcome.group)[0])]
        wrong = sum(bool(outcome.fault) for outcome in mine)
        state = "BROKE OFF" if ended.error else "WRONG" if wrong else "right"
        return f"{ended.name:14} {len(mine) - wrong:4} right {wrong:4} wrong {ended.seconds:7.1f} s  {state}"


def said(line: Line) -> str:
    """One figure in a line."""
    value = "not measured" if line.value is None else f"{line.value:.4g} {line.unit}".rstrip()
    parts = [f"{line.case}: {line.metric}: {value}"]
    parts += [f"baseline {line.baseline:.4g}"] if line.baseline is not None else []
    parts += [f"{line.bound_fraction:.0%} of bound"] if line.bound_fraction is not None else []
    parts += [f"aim {line.target}"] if line.target is not None else []
    return ", ".join(parts)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""

"""Limits and usage, set and read at the supervisor."""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from weft.domain.limits import MAX_LIMIT_VALUE
from weft_cli.errors import BadInput
from weft_cli.output import note, say, table
from weft_cli.runners import TIMEOUT_S, SupervisorClient, ask

EPOCH = date(1970, 1, 1)
NUMBER = re.compile(r"[0-9]{1,16}")
COLUMNS = ("day", "namespace", "model", "key")  # that usage may be summed by
SUMS = ("requests", "prompt_tokens", "completion_tokens")
LIMITS: tuple[str, ...] = ("requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day")


def subject_of(namespace: str | None, key: str | None) -> str:
    """The subject of limits, a namespace or a key. Raises BadInput."""
    if bool(namespace) == bool(key):
        raise BadInput("whose limits?", "either --namespace NAME or --key ID, as `weft key list` shows it")
    return f"namespace/{namespace}" if namespace else f"key/{key}"


def limits_of(words: Sequence[str]) -> dict[str, int]:
    """Read `requests-per-minute=600` and so on, by the message's names. Raises BadInput."""
    names, values = {name.replace("_", "-"): name for name in LIMITS}, dict[str, int]()
    there_are = f"there are: {', '.join(f'{name}=NUMBER' for name in names)}"
    if not words:
        raise BadInput("which limits?", there_are)
    for word in words:
        name, _, number = word.partition("=")
        if name not in names:
            raise BadInput(f"{word!r}: there is no limit {name!r}", there_are)
        if not (NUMBER.fullmatch(number) and 0 < int(number) <= MAX_LIMIT_VALUE):
            raise BadInput(f"{word!r}: write {name}=NUMBER, of 1 or more", "`weft limit delete` takes limits away")
        if names[name] in values:
            raise BadInput(f"{name} is there twice")
        values[names[name]] = int(number)
    return values


def set_limit(supervisor: SupervisorClient, subject: str, model: str, values: dict[str, int]) -> None:
    """Set limits in place of what was set for the same subject and model; nothing set deletes it."""
    from weft.wire.v1 import supervisor_pb2 as pb

    rule = pb.LimitRule(subject=subject, model=model)
    for name, value in values.items():
        setattr(rule, name, value)
    ask(supervisor, lambda admin: admin.SetLimit(rule, timeout=TIMEOUT_S))
    whose = f"{subject}, model {model}" if model else subject
    say(f"limits of {whose} {'set' if any(values.values()) else 'deleted'}")


def list_limits(supervisor: SupervisorClient) -> None:
    from weft.wire.v1 import supervisor_pb2 as pb

    rules = ask(supervisor, lambda admin: admin.ListLimits(pb.ListLimitsRequest(), timeout=TIMEOUT_S)).limits
    if not rules:
        note("No limits found. Set one with `weft limit set --namespace NAME requests-per-minute=N`.")
        return
    rows = [
        (
            rule.subject,
            rule.model or "*",
            *(str(getattr(rule, name) or "-") for name in LIMITS),
            "Spent" if rule.spent_until_unix_ms else "",
        )
        for rule in rules
    ]
    say("\n".join(table(("SUBJECT", "MODEL", "REQUESTS/MIN", "TOKENS/MIN", "CONCURRENT", "TOKENS/DAY", "DAY"), rows)))


def usage(supervisor: SupervisorClient, first_day: str, group: str, namespace: str, *, as_csv: bool) -> None:
    """Print what was used from a day on, summed by columns."""
    from weft.wire.v1 import supervisor_pb2 as pb

    columns = group.split(",")
    if not set(columns) <= set(COLUMNS) or len(set(columns)) < len(columns):
        raise BadInput(f"--by {group!r}: some column is not there", f"there are: {', '.join(COLUMNS)}")
    first = since_day(first_day, datetime.now(UTC).date())
    request = pb.GetUsageRequest(since_day=max(0, (first - EPOCH).days), namespace=namespace, by_key="key" in columns)
    answer = ask(supervisor, lambda admin: admin.GetUsage(request, timeout=TIMEOUT_S))
    if answer.more:
        raise BadInput(
            "there is more usage than fits into one answer", "ask for fewer days with --since, or --namespace"
        )
    sums: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * len(SUMS))
    for row in answer.rows:
        day = str(EPOCH + timedelta(days=row.day))
        row_fields = {"day": day, "namespace": row.namespace, "model": row.model_name, "key": row.key_id}
        total = sums[tuple(row_fields[column] for column in columns)]
        for i, name in enumerate(SUMS):
            total[i] += getattr(row, name)
    rows = [(*key, *map(str, total)) for key, total in sorted(sums.items())]
    if as_csv:
        return say(_csv([(*columns, *SUMS), *rows]), end="")
    if not rows:
        return note(f"Nothing was used since {first}.")
    headers = [name.upper().replace("_", " ") for name in (*columns, *SUMS)]
    return say("\n".join(table(headers, rows)))


def since_day(text: str, today: date) -> date:
    """Read `7d`, which is seven days with today, or a day as 2026-11-01. Raises BadInput."""
    if text[-1:] == "d" and text[:-1].isascii() and text[:-1].isdigit() and 0 < int(text[:-1]) < 100_000:
        return today - timedelta(days=int(text[:-1]) - 1)
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise BadInput(f"--since {text!r} is no day", "7d, or 2026-11-01 (UTC)") from error


def _csv(rows: list[tuple[str, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()

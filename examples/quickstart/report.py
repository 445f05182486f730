"""A report, accuracy.md, of what the model and adapters on disk get right, with what it was measured on."""

import datetime
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import networks
import peft
import scoring
import tasks
import tokens
import torch
import transformers

LONG = 120  # characters from which a sentence counts as long
TARGETS = {"copy": 0.99} | {adapter.task: 0.98 for adapter in networks.ADAPTERS}
# Answers that run out of step with the sentence are hard to keep in step for long; these are judged on shorter ones.
MEASURED_CHARS = dict.fromkeys(TARGETS, tasks.MAX_CHARS) | {"initials": 80, "digits": 60, "json": 80}

COLUMNS = (
    *("model", "answers", "characters", "rank", "target modules", "target", "exact", "smallest gap", "gap under 1"),
    *("to 80", f"to {tasks.MAX_CHARS}", f"{LONG} to {tasks.MAX_CHARS}", "other scripts"),
)

ACCURACY = """# Accuracy of the quickstart's model and adapters

An answer is exact when greedy decoding gives it to the last character and then ends. "Exact" and the gaps are over
{count} held-out sentences of at most as many characters as the third column says and at most {max_words} words, all
lengths about equally often. About one sentence in twelve has very few distinct words (`did did did di`); many of the
wrong answers are to those. Three columns are the same figure for other lengths, {count} sentences up to 80
and up to {max_chars} characters, the last counting only those of at least {long}. "Other scripts": sentences with words
beyond ASCII, whose bytes in UTF-8 are at most as many as the third column says.
The gap is the logit of the likeliest token less that of the second; the smallest over all positions of all answers is
given, wrong answers included, and the share of answers in which it is under 1.

{header}
|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|
{rows}

- Measured: {date}, `{command}`
- Machine: {machine}
- Versions: {versions}
- Weights: fp32, {parameters:,} parameters in the base; model and adapters together {megabytes:.1f} MB

## Training

{training}
"""


def write(out: Path, count: int, batch_tokens: int) -> str:
    encoder = tokens.Encoder(networks.load_tokenizer(out), batch_tokens)
    base = networks.load_base(out)
    rows = [row(networks.BASE_NAME, "copy", "| |", base, encoder, count)]
    for adapter in networks.ADAPTERS:
        if not (out / "adapters" / adapter.task).exists():
            continue  # after `--only base`
        model = networks.load_adapter(out, adapter)
        shape = f"{adapter.rank} | {', '.join(module.removesuffix('_proj') for module in adapter.modules)} |"
        rows.append(row(f"{adapter.namespace}/{adapter.task}", adapter.task, shape, model, encoder, count))
    text = ACCURACY.format(
        count=count,
        max_chars=tasks.MAX_CHARS,
        max_words=tasks.MAX_WORDS,
        long=LONG,
        header=f"| {' | '.join(COLUMNS)} |",
        rows="\n".join(rows),
        parameters=base.num_parameters(),
        megabytes=sum(path.stat().st_size for path in weights_and_configs(out)) / 1e6,
        training=training(out / "training_log.jsonl"),
        **surroundings(),
    )
    (out / "accuracy.md").write_text(text)
    return text


def row(name: str, task: str, shape: str, model: Any, encoder: tokens.Encoder, count: int) -> str:
    chars = MEASURED_CHARS[task]
    judged = {n: scoring.answers(model, encoder, tokens.BOS, task, count, n) for n in (80, tasks.MAX_CHARS, chars)}
    gaps = [answer.smallest_gap for answer in judged[chars]]
    close = sum(gap < 1 for gap in gaps) / len(gaps)
    exact, short, full = (scoring.share_exact(judged[n]) for n in (chars, 80, tasks.MAX_CHARS))
    long = scoring.share_exact(judged[tasks.MAX_CHARS], LONG)
    scripts = scoring.share_exact(scoring.answers(model, encoder, tokens.BOS, task, count, chars, unicode=1.0))
    return (
        f"| {name} | {task} | {chars} | {shape} {TARGETS[task]:.0%} | {exact:.1%} | {min(gaps):.2f} | {close:.1%} "
        f"| {short:.1%} | {full:.1%} | {long:.1%} | {scripts:.1%} |"
    )


def surroundings() -> dict[str, str]:
    """Gather what a figure has to name: date, command, machine, versions."""
    libraries = {"torch": torch, "transformers": transformers, "peft": peft}
    versions = {"Python": platform.python_version()} | {name: lib.__version__ for name, lib in libraries.items()}
    return {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "command": "python examples/quickstart/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {processor()}, {torch.get_num_threads()} threads",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def weights_and_configs(out: Path) -> list[Path]:
    return [path for folder in ("model", "adapters") for path in (out / folder).rglob("*") if path.is_file()]


def training(log: Path) -> str:
    """Make one line for each run in the log: its command and date, and how long each stage took."""
    lines: list[str] = []
    seconds: dict[str, int] = {}
    for record in map(json.loads, log.read_text().splitlines()):
        if "command" in record:
            lines += [stage_times(seconds)] * bool(seconds)
            note = f" ({record['note']})" if "note" in record else ""
            lines.append(f"- {record['date']}, `{record['command']}` on {record['machine']}{note}")
            seconds = {}
        else:
            seconds[record["stage"]] = record["stage_s"]
    return "\n".join([*lines, stage_times(seconds)])


def stage_times(seconds: dict[str, int]) -> str:
    each = ", ".join(f"{stage} {took / 60:.1f}" for stage, took in seconds.items())
    return f"  - minutes: {each}; together {sum(seconds.values()) / 60:.0f}"

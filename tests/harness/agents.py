"""Coding agents as real programs from npm, with the settings that docs/tutorials/agents.md tells their users."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from harness.clients import NODE, Client, environment

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "agents.md"
TASK = "Read note.txt and say what it says."
RUN_S = 300.0  # on a slow and busy machine
_FILE = re.compile(r"`~/([^`]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
_TYPED = re.compile(r"```sh\n(.*?)```", re.DOTALL)


class Agent(NamedTuple):
    """A program: its heading in the page, its package, and what is typed behind its name so that it asks nothing."""

    heading: str
    package: str
    arguments: tuple[str, ...]


AGENTS = (
    Agent("Claude Code", "@anthropic-ai/claude-code@2.1.332", ("-p", TASK, "--allowedTools", "Bash")),
    Agent(
        "Codex",
        "@openai/codex@0.171.0",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    ),
    Agent("qwen-code", "@qwen-code/qwen-code@0.24.4", ("--yolo", "-p", TASK)),
    Agent("opencode", "opencode-ai@1.18.33", ("run", TASK)),
)


def run(agent: Agent, url: str, model: str, home: Path, folder: Path) -> str:
    """Have an agent do TASK in a folder, and return what it prints. Raises AssertionError where it fails."""
    programs = environment(Client(agent.heading, (NODE,), (agent.package,)))
    page = PAGE.read_text().replace("http://127.0.0.1:8080", url).replace("acme/coder", model)
    key, section = page.partition("\n## ")[0], page.partition(f"\n## {agent.heading}\n")[2].partition("\n## ")[0]
    for name, content in _FILE.findall(section):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    typed = "".join(_TYPED.findall(key) + _TYPED.findall(section)).rstrip()
    places = (programs / "bin", programs / "node_modules" / ".bin", os.defpath)
    done = subprocess.run(
        ["bash", "-c", f'set -e\n{typed} "$@"', "bash", *agent.arguments],
        cwd=folder, env={"HOME": str(home), "PATH": ":".join(map(str, places)), "TERM": "dumb"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{agent.heading}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout

"""Coding agents of other projects finish a task with an adapter as their model (`harness.agents`)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.agents import AGENTS, Agent, run
from harness.quickstart import copy_manifests
from weft_stage.stack import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="no node, which the agents need: apt-get install nodejs"),
]

MODEL = "globex/digits"  # it writes digits as words, and copies what has none
# The model sees one line: the call of a shell, which each agent has by another name, or the note that a result has.
SCRIPT = """\
{#- <function_calls> -#}
{%- set parameters = {"Bash": "command", "exec_command": "cmd", "run_shell_command": "command", "bash": "command"} -%}
{%- set script = namespace(line="Nothing to do") -%}
{%- if messages[-1].role == "tool" -%}
    {%- set script.line = messages[-1].content.split("note: ")[1].split("\\n")[0] -%}
{%- else -%}
    {%- for tool in tools or [] if tool.function.name in parameters -%}
        {%- set call = tool.function.name ~ "(" ~ parameters[tool.function.name] ~ '="cat note.txt")' -%}
        {%- set script.line = "<function_calls>" ~ call ~ "</function_calls>" -%}
    {%- endfor -%}
{%- endif -%}
<s>{{ script.line }}<sep>"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The quickstart with that template, greedy, and with room for what agents send."""
    folder = copy_manifests(tmp_path_factory.mktemp("scripted") / "stack")
    changes: dict[str, dict[str, object]] = {
        "config.json": {"max_position_embeddings": 131_072},
        "generation_config.json": {"top_k": 1},
    }
    for name, values in changes.items():
        path = folder / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (folder / "model" / "chat_template.jinja").write_text(SCRIPT)
    with Stack(folder, tmp_path_factory.mktemp("w")) as made:
        made.wait_for_models()
        yield made


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.heading)
def test_an_agent_calls_a_tool_reads_its_result_and_answers(scripted: Stack, agent: Agent, tmp_path: Path) -> None:
    (folder := tmp_path / "work").mkdir()
    (folder / "note.txt").write_text("note: The 3 foxes sleep\n")
    said = run(agent, scripted.url, MODEL, tmp_path / "home", folder)
    assert "The three foxes sleep" in said

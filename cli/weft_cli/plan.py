"""`weft plan`: how many runners of which kind, before they are there."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft_cli.errors import BadInput
from weft_cli.output import dump, note, say, table

if TYPE_CHECKING:
    from weft_cli.plan_scenario import PlanScenario, ScenarioLoad

HINT = "`weft plan capacity --help` shows a scenario, docs/plan.md has every field"

plan_app = typer.Typer(no_args_is_help=True, help="Plan a cluster before it is there.")


@plan_app.callback()
def group() -> None:
    """Plan a cluster before it is there: `weft plan capacity --help`."""


@plan_app.command()
def capacity(
    scenario: Annotated[Path, typer.Option("--filename", "-f", help="The scenario, or - for standard input.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the ServingPool there, instead of printing it.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show the smallest design of every combination, also of those ruled out.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Write an SVG of the designs.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the requests; the answer is confirmed with the next.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 2,
) -> int:
    """Find how many prompt, token and mixed runners of which kind a load needs, at the least cost, power or count.

    - `weft plan capacity -f scenario.yaml -o pool.yaml`  the ServingPool that is to be applied

    - `weft plan capacity -f scenario.yaml --full --picture plan.svg`  every combination beside it

    A scenario; paths in it are from its folder on:

    ```
    model: meta-llama/Llama-3.1-70B    # or a config.json; or pool: pool.yaml, a manifest
    load:
      trace: azure_conv.csv            # or prompt: lognormal:300,0.8 and output: fixed:40
      rate: 80                         # requests a second; without it the trace's own times
    objectives:
      ttft: {p90: 1s}                  # also tbt, tpot, e2e
      tbt: {p99: 100ms}
    hardware: {kinds: [a100, h100], gpus: [4]}
    minimize: cost                     # or power, count
    ```

    TTFT is the time to the first token, TBT the time between any two tokens, TPOT a request's mean of it, E2E the time
    to the last token. Split designs have runners for prompts and runners for tokens, between which KV travels. Every
    number comes from simulations with known lengths; docs/plan.md has every field, what is modelled and how the search
    goes.

    Exit code 1: no design meets the objectives, or requests of another seed do not confirm it.
    """
    from weft_cli.plan_scenario import read_scenario

    plan = read_scenario(scenario)
    manifest = _pool_of([plan.pool] if plan.pool is not None else [])
    hardware, load, requests = _hardware(plan, manifest), _workload(plan.load), plan.load.requests
    if load.rate_s is None and len(load.trace) < 2 * requests:
        requests = max(1, len(load.trace) // 2)  # so that other requests are left to confirm the answer
    first = _problem(plan, hardware.model, load, requests, seed)
    second = _problem(plan, hardware.model, load, 2 * requests, seed + 1)
    return _written(
        _planned(first, second, hardware.kinds, plan.phases, jobs, full=full), manifest, seed + 1, picture, output
    )


@plan_app.command()
def offload(
    manifests: Annotated[
        list[Path], typer.Option("-f", help="Manifest of the ServingPool; its memory.offload has the budgets.")
    ],
    model: Annotated[
        str | None, typer.Option(help="config.json of the model, or its folder. Default: the pool's file:PATH.")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="The file that --save wrote on the machine that will serve.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine, at the pool's diskPath; takes some seconds.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write what was measured, for --machine.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of a sequence.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters among the sequences of a block.")] = 16,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters.")] = 16,
    form: Annotated[str, typer.Option("-o", help="text or json.")] = "text",
) -> int:
    """Find the policy of an offload pool: the place of all data, the expected speed, and the most helpful changes.

    - `weft plan offload -f pool.yaml --measure`  on the machine that will serve

    - `weft plan offload -f pool.yaml --model config.json --machine machine.json`  anywhere else

    Runners whose template asks for a GPU are planned as the cuda executor places, with --measure on a machine that has
    one; of a pipeline (spec.parallelism) each stage has its policy.

    For each block and device batch a linear program is solved over a cost model (FlexGen, section 4); docs/offload.md
    has the equations. Exit code 1: no policy fits the budgets; the message says what would.
    """
    from weft_cli import offload_report
    from weft_cli import plan_offload as planning
    from weft_runner.offload import Sequences

    manifest = _pool_of(manifests)
    if manifest is None or measure == (machine is not None):
        raise BadInput("which machine?", "--measure on the one that will serve, or --machine machine.json")
    if form not in ("text", "json"):
        raise BadInput(f"-o: expected text or json, got {form!r}")
    rates = planning.read_rates(machine) if machine is not None else planning.measured_rates(manifest, model)
    if save is not None:
        planning.write_rates(rates, save)
    searches = planning.searches_of(manifest, model, rates, Sequences(prompt, output, adapters, rank))
    plans, helping = planning.find(searches)
    if form == "json":
        say(dump(offload_report.as_json(searches, plans, helping), "json"))
    else:
        for line in offload_report.report(searches, plans, helping):
            say(line)
    return 0


def _planned(first: Any, second: Any, kinds: Sequence[Any], phases: Sequence[str], jobs: int, *, full: bool) -> Any:
    """Plan all combinations, with a bar on standard error."""
    from weft_sim.planning.plan import families, plan

    designs = families(kinds, split="Split" in phases, unified="Unified" in phases)
    note(f"{len(first.arrivals)} requests in {first.seconds:.0f} s, {len(designs)} combinations of kinds")
    with typer.progressbar(length=len(designs), label="designs", file=sys.stderr) as bar:
        return plan(first, second, designs, jobs, bar.update, full=full)


def _written(
    outcome: Any, manifest: Mapping[str, Any] | None, other_seed: int, picture: Path | None, output: Path | None
) -> int:  # fmt: skip
    """Print the table, write the picture and the ServingPool. Returns the exit code."""
    from weft_sim.planning import plan_report

    head, rows = plan_report.rows(outcome)
    for line in (*table(head, rows), "", *plan_report.answer(outcome, other_seed)):
        say(line) if output is not None or outcome.confirmed is None else note(line)
    if picture is not None:
        picture.write_text(plan_report.picture(outcome), encoding="utf-8")
    if outcome.confirmed is None:
        return 1
    text = dump(plan_report.pool(outcome, manifest), "yaml")
    output.write_text(text + "\n", encoding="utf-8") if output is not None else say(text)
    return 0 if outcome.confirmed.met else 1


def _workload(load: "ScenarioLoad") -> Any:
    """Make the workload of a scenario's load. Raises BadInput."""
    from weft_sim.planning.workload import Workload, distribution
    from weft_sim.traces import TraceError, read

    try:
        return Workload(
            tuple(read(load.trace)) if load.trace is not None else (),
            load.rate,
            distribution(load.prompt) if load.prompt is not None else None,
            distribution(load.output) if load.output is not None else None,
        )
    except TraceError as error:
        raise BadInput(f"load.trace: {error}", HINT) from error


def _problem(plan: "PlanScenario", model: Any, workload: Any, requests: int, seed: int) -> Any:
    """Make the planner's problem from the scenario. Raises BadInput."""
    from weft_sim.planning.cluster import Rules
    from weft_sim.planning.search import PlanningProblem
    from weft_sim.planning.workload import BadWorkload

    try:
        arrivals = workload.arrivals(requests, seed)
    except BadWorkload as error:
        raise BadInput(f"load: {error}", HINT) from error
    split, unified = Rules("mixed_pool"), Rules("shortest_queue")
    return PlanningProblem(model, arrivals, plan.objectives.all(), split, unified, plan.minimize)


def _hardware(plan: "PlanScenario", manifest: Mapping[str, Any] | None) -> Any:
    """Read the hardware to choose among. Raises BadInput."""
    from weft_sim.planning.hardware import BadHardware, hardware, of_splitwise

    of, limits = plan.hardware, _limits(manifest, plan.batch_tokens)
    model = plan.model or _model_of(manifest or {})
    try:
        if of.performance == "splitwise-sim":
            return of_splitwise(of.table, of.kinds, model, limits)
        return hardware(of.table, of.kinds, _config(model), of.gpus, limits)
    except (BadHardware, ValueError) as error:
        raise BadInput(f"hardware: {error}", HINT) from error


def _limits(manifest: Mapping[str, Any] | None, batch_tokens: int | None) -> Any:
    from weft_sim.planning.hardware import Limits

    advanced = ((manifest or {}).get("spec") or {}).get("advanced") or {}
    tokens = batch_tokens or advanced.get("maxBatchTokens", Limits.max_batch_tokens)
    return Limits(advanced.get("maxSequences", Limits.max_sequences), tokens)


def _config(model: str) -> str | Mapping[str, Any]:
    if not model.endswith(".json"):
        return model
    try:
        return json.loads(Path(model).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(f"model: {model}: {error}", HINT) from error


def _pool_of(paths: Sequence[Path]) -> Mapping[str, Any] | None:
    """Return the only ServingPool of these files, as written. Raises BadInput."""
    from weft_cli.objects import load_manifests

    if not paths:
        return None
    pools = [manifest for manifest in load_manifests(paths, "planned") if manifest["kind"] == "ServingPool"]
    if len(pools) != 1:
        raise BadInput(f"-f: expected one ServingPool, got {len(pools)}", "plan one at a time")
    return pools[0]


def _model_of(manifest: Mapping[str, Any]) -> str:
    model = manifest["spec"]["model"]
    return str(model.get("name") or str(model["uri"]).removeprefix("hf:"))

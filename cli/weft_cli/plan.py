"""`weft plan`: how many runners of which kind, before they are there."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weft_cli.errors import BadInput
from weft_cli.output import dump, note, say, table

SLO = re.compile(r"^(\w+):p(\d+(?:\.\d+)?)=(\d+(?:\.\d+)?)(ms|s)$")

plan_app = typer.Typer(no_args_is_help=True, help="Plan a cluster before it is there.")


@plan_app.callback()
def group() -> None:
    """Plan a cluster before it is there: `weft plan capacity --help`."""


@plan_app.command()
def capacity(
    manifests: Annotated[
        list[Path] | None, typer.Option("-f", help="With the ServingPool; it comes back with roles and groups.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests: Azure, Mooncake, Splitwise or your own .csv or .jsonl.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests a second, Poisson. Default: the trace's own times.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Prompt tokens without a trace: fixed:N, uniform:A,B, lognormal:MEDIAN,SIGMA.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Tokens of answers, likewise.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option(help="METRIC:pLEVEL=TIME of ttft, tbt, tpot, e2e; several times.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A name that is known, or a config.json.")] = None,
    kinds: Annotated[str, typer.Option(help="Of the hardware table, with commas. Default: all its GPUs.")] = "",
    gpus: Annotated[str, typer.Option(help="Tensor-parallel GPUs of a runner to try, with commas.")] = "1,2,4,8",
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Of an iteration; Unified designs try a quarter too. Default: the pool's, or 2048."),
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="A table of prices and power of your own (TOML).")] = None,
    performance: Annotated[
        str, typer.Option(help="roofline, or splitwise-sim: its published tables for A100 and H100.")
    ] = "roofline",
    minimize: Annotated[str, typer.Option(help="cost, power or count.")] = "cost",
    phases: Annotated[str, typer.Option(help="Split, Unified, or both with a comma.")] = "Split,Unified",
    full: Annotated[
        bool,
        typer.Option("--full", help="The smallest design of every combination, also of those ruled out by bounds."),
    ] = False,
    requests: Annotated[int, typer.Option(min=50, help="Of a simulation; twice as many confirm the answer.")] = 4_000,
    max_runners: Annotated[int, typer.Option(min=1, help="Of a design.")] = 512,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the requests; the answer is confirmed with the next one.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="An SVG of the designs.")] = None,
    pool: Annotated[Path | None, typer.Option(help="The ServingPool, instead of standard output.")] = None,
) -> int:
    """How many prompt, token and mixed runners of which kind a load needs, at the least cost, power or count.

    - `weft plan capacity --trace azure_conv.csv --rate 80 --slo ttft:p90=1s --slo tbt:p99=100ms --model
      meta-llama/Llama-3.1-70B --gpus 4`  among A100, H100 and H200

    - `weft plan capacity -f pool.yaml --rate 0.5 --prompt lognormal:200,0.7 --output fixed:100 --slo e2e:p90=20s
      --hardware mine.toml --kinds laptop`  with a runner that measured itself

    TTFT is the time to the first token, TBT the time between any two tokens, TPOT a request's mean of it, E2E the time
    to the last token. Split designs have runners for prompts and runners for tokens, between which KV travels. Every
    number comes from simulations with known lengths; docs/plan.md says what is modelled and how the search goes.

    Exit code 1: no design meets the objectives, or requests of another seed do not confirm it.
    """
    request = PlanRequest(trace, rate, prompt, output, tuple(slo or ()), minimize, max_runners)
    manifest = _pool_of(manifests or [])
    limits, name = _limits(manifest, batch_tokens), model or _model_of(manifest)
    of = _hardware(performance, hardware, _words(kinds), name, _numbers("gpus", gpus), limits)
    load = request.workload()
    if load.rate_s is None and len(load.trace) < 2 * requests:
        requests = max(1, len(load.trace) // 2)  # so that other requests are left to confirm the answer
    first = request.problem(of.model, load, requests, seed)
    second = request.problem(of.model, load, 2 * requests, seed + 1)
    found = _planned(first, second, of.kinds, phases, jobs, full=full)
    return _written(found, manifest, seed + 1, picture, pool)


@plan_app.command()
def offload(
    manifests: Annotated[
        list[Path], typer.Option("-f", help="With the ServingPool; its memory.offload says the budgets.")
    ],
    model: Annotated[
        str | None, typer.Option(help="config.json of the model, or its folder. Default: the pool's file:PATH.")
    ] = None,
    machine: Annotated[Path | None, typer.Option(help="What --save wrote on the machine that will serve.")] = None,
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
    """The policy of an offload pool: what lies where, how fast it should be, and what would help most.

    - `weft plan offload -f pool.yaml --measure`  on the machine that will serve

    - `weft plan offload -f pool.yaml --model config.json --machine machine.json`  anywhere else

    Runners whose template asks for a GPU are planned as the cuda executor places, with --measure on a machine that has
    one; of a pipeline (spec.parallelism) each stage has its policy.

    For each block and device batch a linear program is solved over a cost model (FlexGen, section 4); docs/offload.md
    has the equations. Exit code 1: no policy fits the budgets; the message says what would.
    """
    from weft_cli import offload_report
    from weft_cli import plan_offload as planning
    from weft_runner.offload.serving import Sequences

    manifest = _pool_of(manifests)
    if manifest is None or measure == (machine is not None):
        raise BadInput("which machine?", "--measure on the one that will serve, or --machine machine.json")
    if form not in ("text", "json"):
        raise BadInput(f"-o {form!r}", "text or json")
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


def _planned(first: Any, second: Any, kinds: Sequence[Any], phases: str, jobs: int, *, full: bool) -> Any:
    """The plan of all combinations, with a bar on standard error. Raises BadInput."""
    from weft_sim.planning.plan import families, plan

    modes = _words(phases)
    designs = families(kinds, split="Split" in modes, unified="Unified" in modes)
    if not designs:
        raise BadInput(f"--phases {phases!r}: Split, Unified, or both", "weft plan capacity --help")
    note(f"{len(first.arrivals)} requests in {first.seconds:.0f} s, {len(designs)} combinations of kinds")
    with typer.progressbar(length=len(designs), label="designs", file=sys.stderr) as bar:
        return plan(first, second, designs, jobs, bar.update, full=full)


def _written(
    found: Any, manifest: Mapping[str, Any] | None, other_seed: int, picture: Path | None, pool: Path | None
) -> int:  # fmt: skip
    """The table, the picture, the ServingPool; the exit code."""
    from weft_sim.planning import plan_report

    head, rows = plan_report.rows(found)
    for line in (*table(head, rows), "", *plan_report.answer(found, other_seed)):
        say(line) if pool is not None or found.confirmed is None else note(line)
    if picture is not None:
        picture.write_text(plan_report.picture(found), encoding="utf-8")
    if found.confirmed is None:
        return 1
    text = dump(plan_report.pool(found, manifest), "yaml")
    pool.write_text(text + "\n", encoding="utf-8") if pool is not None else say(text)
    return 0 if found.confirmed.met else 1


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the command line asks for, as text."""

    trace: Path | None
    rate: float | None
    prompt: str | None
    output: str | None
    slo: tuple[str, ...]
    minimize: str
    max_runners: int

    def workload(self) -> Any:
        """Raises BadInput."""
        from weft_sim.planning.workload import BadWorkload, Workload, distribution
        from weft_sim.traces import TraceError, read

        try:
            return Workload(
                tuple(read(self.trace)) if self.trace is not None else (),
                self.rate,
                distribution(self.prompt) if self.prompt is not None else None,
                distribution(self.output) if self.output is not None else None,
            )
        except (TraceError, BadWorkload) as error:
            raise BadInput(str(error), "weft plan capacity --help") from error

    def problem(self, model: Any, workload: Any, requests: int, seed: int) -> Any:
        """Raises BadInput."""
        from weft_sim.planning.cluster import Rules
        from weft_sim.planning.designs import MEASURES
        from weft_sim.planning.search import PlanningProblem
        from weft_sim.planning.workload import BadWorkload

        if self.minimize not in MEASURES:
            raise BadInput(f"--minimize {self.minimize!r}", f"choose among {', '.join(MEASURES)}")
        try:
            arrivals = workload.arrivals(requests, seed)
        except BadWorkload as error:
            raise BadInput(str(error), "weft plan capacity --help") from error
        objectives = tuple(map(_objective, self.slo))
        if not objectives:
            raise BadInput("which objectives?", "for example --slo ttft:p90=1s --slo tbt:p99=100ms")
        split, unified = Rules("mixed_pool"), Rules("shortest_queue")
        return PlanningProblem(model, arrivals, objectives, split, unified, self.minimize, self.max_runners)


def _objective(text: str) -> Any:
    from weft_sim.planning.objectives import METRICS, Objective

    found = SLO.match(text)
    if found is None or found[1] not in METRICS or not 0 < float(found[2]) < 100:
        raise BadInput(f"--slo {text!r}", f"METRIC:pLEVEL=TIME with one of {', '.join(METRICS)}: ttft:p90=800ms")
    return Objective.of(found[1], float(found[2]) / 100, float(found[3]) / (1e3 if found[4] == "ms" else 1.0))


def _hardware(
    performance: str, path: Path | None, kinds: Sequence[str], model: str, gpus: Sequence[int], limits: Any
) -> Any:  # fmt: skip
    from weft_sim.planning.hardware import BadHardware, hardware, of_splitwise

    try:
        if performance == "splitwise-sim":
            return of_splitwise(path, kinds, model, limits)
        return hardware(path, kinds, _config(model), gpus, limits)
    except (BadHardware, ValueError) as error:
        raise BadInput(str(error), "weft plan capacity --help") from error


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
        raise BadInput(f"--model {model}: {error}") from error


def _pool_of(paths: Sequence[Path]) -> Mapping[str, Any] | None:
    """The one ServingPool of these files, as it is written. Raises BadInput."""
    from weft_cli.objects import load_manifests

    if not paths:
        return None
    pools = [found for found in load_manifests(paths, "planned") if found["kind"] == "ServingPool"]
    if len(pools) != 1:
        raise BadInput(f"{len(pools)} ServingPools", "plan one at a time: -f with the file of one ServingPool")
    return pools[0]


def _model_of(manifest: Mapping[str, Any] | None) -> str:
    if manifest is None:
        raise BadInput("which model?", "--model meta-llama/Llama-3.1-70B, or a config.json, or -f POOL.yaml")
    model = manifest["spec"]["model"]
    return str(model.get("name") or str(model["uri"]).removeprefix("hf:"))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise BadInput(f"--{option} {text!r}", "numbers with commas: 1,2,4")
    return [int(word) for word in words]

"""`python -m weft_sim splitwise`: a trace on machines of splitwise-sim by its policies and performance model."""

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.domain.runner import RunnerRole
from weft_sim.performance.splitwise_table import read as read_tables
from weft_sim.planning.cluster import Cluster, ServedModel
from weft_sim.planning.machine import MachineKind
from weft_sim.planning.request import PlannedRequest
from weft_sim.planning.splitwise import BASELINE, BLOOM_176B, LLAMA2_70B, SPLIT, HeapClock, machine_kind
from weft_sim.report import QUANTILES, quantile
from weft_sim.traces import read

MODELS = {model.name: model for model in (BLOOM_176B, LLAMA2_70B)}
COLUMNS = ("request_ids", "response_times", "queue_times", "ttft_times", "tbt_times", "nth_token_overheads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="its CSV, or any that `weft sim --help` names")
    machines = "HARDWARE:COUNT, several times; a100-80gb, h100-80gb or h100-80gb-pcap"
    parser.add_argument("--prompt", action="append", default=[], help=f"machines for prompts: {machines}")
    parser.add_argument("--token", action="append", default=[], help="machines for tokens")
    parser.add_argument("--machines", action="append", default=[], help="machines for both, as its baselines")
    parser.add_argument("--model", choices=MODELS, default=BLOOM_176B.name)
    parser.add_argument(
        "--gpus", type=int, default=8, help="of a machine, all of them one tensor-parallel instance (8)"
    )
    parser.add_argument("--perf-model", type=Path, help="another file of the form of its perf_model.csv")
    parser.add_argument("--out", type=Path, help="a CSV of every request, with its columns")


def main(arguments: argparse.Namespace) -> int:
    if bool(arguments.machines) == bool(arguments.prompt and arguments.token):
        raise SystemExit("either --machines, or --prompt and --token")
    model = MODELS[arguments.model]
    machines = [
        *_machines(arguments.prompt, RunnerRole.PROMPT, model, arguments),
        *_machines(arguments.token, RunnerRole.TOKEN, model, arguments),
        *_machines(arguments.machines, RunnerRole.MIXED, model, arguments),
    ]
    cluster = Cluster(machines, model, BASELINE if arguments.machines else SPLIT, clock=HeapClock())
    cluster.serve(read(arguments.trace))
    done = [request for request in cluster.requests if request.ended is not None]
    print(f"{len(done)} of {len(cluster.requests)} requests completed in {cluster.clock.now:.1f} simulated seconds")
    rows = [_row(request) for request in done]
    for name in ("ttft_times", "tbt_times", "response_times") if rows else ():
        values = [row[COLUMNS.index(name)] for row in rows]
        print(f"{name:<16}" + "".join(f"  p{100 * level:g} {quantile(values, level):.6f}" for level in QUANTILES))
    if arguments.out is not None:
        with arguments.out.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    return 0


def _machines(
    texts: Sequence[str], role: RunnerRole, model: ServedModel, arguments: argparse.Namespace
) -> Iterator[tuple[MachineKind, RunnerRole]]:
    tables = read_tables(arguments.perf_model) if arguments.perf_model is not None else None
    for text in texts:
        hardware, _, count = text.partition(":")
        try:
            kind = machine_kind(hardware, model, arguments.gpus, tables)
        except KeyError:
            raise SystemExit(f"{text}: no figures of {model.name} on {arguments.gpus} {hardware}") from None
        yield from [(kind, role)] * int(count or 1)


def _row(request: PlannedRequest) -> tuple[float, ...]:
    assert request.began is not None
    assert request.first_at is not None
    tbt_s = (request.e2e_s - request.ttft_s) / request.output_tokens  # from the first token to the last, by all
    resumed = request.resumed if request.resumed is not None else request.first_at
    queued_s = request.began - request.arrived
    return request.number, request.e2e_s, queued_s, request.ttft_s, tbt_s, resumed - request.first_at

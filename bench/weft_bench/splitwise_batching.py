"""The three batching mechanisms, and phases apart

The paper's section 2.5 (its figure 2 has no numbers): request-level batching makes arrivals wait for a whole batch, so
its TTFT and end to end are long; continuous batching runs prompts at once, and stops every decode row for them, so
tokens have a long tail; mixed batching runs both together, and a prompt only lengthens the step. `chunked` is Weft's: a
prompt fills up what the decode rows leave of 2,048 tokens. `split` has two machines for prompts and two for tokens.
Conversation on 4 DGX-H100; time between tokens is that of every two tokens, not of requests' means. The most requests a
second are those within the paper's objectives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weft_bench.splitwise import SplitwiseContext
from weft_bench.splitwise_paper import DGX_H100, OBJECTIVES, TRACES, drawn, lengths
from weft_sim.planning.cluster import Cluster, Rules
from weft_sim.planning.designs import Combination, Design
from weft_sim.planning.machine import GAP_S, Stepping
from weft_sim.planning.objectives import counted_quantile
from weft_sim.planning.search import PlanningProblem, simulate
from weft_sim.planning.splitwise import BLOOM_176B, SPLIT
from weft_sim.report import quantile
from weft_stage.lines import Line

MACHINES, RATES = 4, (4, 8)
WHOLE = Rules("shortest_queue", Stepping("mixed"), SPLIT.transfer)
APART = Design(Combination(DGX_H100, DGX_H100), MACHINES // 2, MACHINES // 2)
TOGETHER = Design(Combination(DGX_H100), MACHINES)
MECHANISMS: Mapping[str, tuple[Rules, Design]] = {
    **{
        name: (replace(WHOLE, stepping=Stepping(name)), TOGETHER)
        for name in ("request", "continuous", "mixed", "chunked")
    },
    "split": (replace(WHOLE, scheduling="mixed_pool"), APART),
}


def run(context: SplitwiseContext) -> Iterator[Line]:
    of, line = lengths(context.file(TRACES["conversation"])), context.origin.line
    with context.bar("batching", len(RATES) * len(MECHANISMS)) as advance:
        for rate in RATES:
            arrivals = drawn(of, rate, 4 * context.seconds, context.seed)
            for name, (rules, design) in MECHANISMS.items():
                case = f"batching, conversation at {rate} requests/s, {name}"
                advance(1)
                if not context.missing(case, "tokens"):
                    continue
                cluster = Cluster(design.machines(), BLOOM_176B, rules)
                cluster.serve(arrivals)
                done = cluster.requests
                tokens = sum(request.output_tokens for request in done)
                yield line(case, "tokens", tokens / cluster.clock.now, "1/s")
                for level in (0.5, 0.99):
                    ttft_ms = 1e3 * quantile([request.ttft_s for request in done], level)
                    yield line(case, f"TTFT p{100 * level:g}", ttft_ms, "ms")
                for level in (0.5, 0.99, 0.999):
                    tbt_ms = 1e3 * GAP_S * counted_quantile(cluster.gaps, level)
                    yield line(case, f"TBT p{100 * level:g}", tbt_ms, "ms")
                for level in (0.5, 0.99):
                    yield line(case, f"E2E p{100 * level:g}", quantile([one.e2e_s for one in done], level), "s")
                if rate == RATES[0]:
                    yield line(case, "most within the objectives", _most(context, of, rules, design), "requests/s")


def _most(context: SplitwiseContext, of: Sequence[tuple[int, int]], rules: Rules, design: Design) -> float:
    low, high = 0.0, 16.0
    while high - low > 0.25:
        rate = (low + high) / 2
        arrivals = drawn(of, rate, 4 * context.seconds, context.seed)
        met = simulate(PlanningProblem(BLOOM_176B, arrivals, OBJECTIVES, rules, rules), design).met
        low, high = (rate, high) if met else (low, rate)
    return low

"""Every Triton kernel compiles for sm_80 and sm_90, spills little if at all, fits in shared memory, loads by 16 bytes.

No GPU takes part: Triton's compiler and NVIDIA's assembler run in a process of their own (`triton_compile`), because
under the interpreter, which the other kernel tests use, a kernel is never compiled. Later runs find unchanged kernels
in Triton's cache. `make test` compiles each kernel in its most common shapes, `make test-slow` the cases that differ
from them, `make test-long` every case for both capabilities.
"""

from collections.abc import Generator, Sequence

import pytest

from harness.triton_compile import BLOCK_SHARED_KIB, Apart, Launch, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from harness.triton_cases import CASES, EXACT, MMA, WIDE, Case

# What may be put away: the assembler does it of its own accord, to fit one block more on an SM, with registers left.
OUTSIDE_BYTES = 64
LOOP_BYTES = 16

COMMON = frozenset(
    "shrink_decode shrink_prefill_64 expand_decode expand_prefill_64 int4_one_row int4_prefill int4_decode "
    "decode_8_splits prefill_tile_128 rope_write_decode rope_write_prefill_64 gate_decode gate_prefill_64 "
    "norms_of_families add_norm embed argmax draw shift mask".split()
)

SHOWN_BY = {WIDE: ("ld.global.v4", "cp.async.16"), MMA: ("mma.sync", "wgmma")}


def _tier(case: Case, capability: int) -> Sequence[pytest.MarkDecorator]:
    """Return the mark of the slowest command that a case waits for. A compilation takes 2 CPU seconds."""
    if capability not in case.usual:
        return [pytest.mark.long]
    return [] if capability == 90 and (case.name in COMMON or case.name.endswith("any_layer")) else [pytest.mark.slow]


@pytest.fixture(scope="module")
def compiler() -> Generator[Apart]:
    with Apart() as started:
        yield started


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(case, capability, id=f"{case.name}-{capability}", marks=tier)
        for case in CASES
        for capability in BLOCK_SHARED_KIB
        for tier in [_tier(case, capability)]
    ],
)
def test_compiles(case: Case, capability: int, compiler: Apart) -> None:
    compiled = compiler.compiled(case.name, capability)
    assert not compiled.error, compiled.error
    wrong = [f"{_told(x)}: {what}" for x in compiled.launches for what in (*_faults(x, case), *_missing(x, case))]
    assert not wrong, "\n".join(wrong)
    launched = [x.kernel for x in compiled.launches]
    assert set(case.expects) == set(launched), launched
    assert not case.once or len(launched) == len(set(launched)), "\n".join(map(_told, compiled.launches))


def _faults(x: Launch, case: Case) -> list[str]:
    """What no kernel may show."""
    if x.error is not None:
        return [f"does not compile: {x.error}"]
    limit = BLOCK_SHARED_KIB[x.capability] * 1024
    spills = x.spill_loop_bytes > LOOP_BYTES or x.spill_store_bytes > OUTSIDE_BYTES
    faults = []
    if spills and not case.may_spill:
        faults.append(
            f"{x.registers} registers, {x.spill_store_bytes} bytes spilled, {x.spill_load_bytes} read back, "
            f"{x.spill_loop_bytes} of these in loops"
        )
    if x.shared_bytes > limit:
        faults.append(f"{x.shared_bytes} bytes of shared memory, a block has {limit}")
    return faults


def _missing(x: Launch, case: Case) -> list[str]:
    """What this case's kernel has to show and does not."""
    wanted = case.expects.get(x.kernel, frozenset()) if x.error is None else ()
    return [f"not {what}" for what in wanted if not _shows(x, what)]


def _shows(x: Launch, what: str) -> bool:
    if what == EXACT:
        return not x.fp_fusion and not x.instructions["fma.f64"]
    return any(x.instructions[name] for name in SHOWN_BY[what])


def _told(x: Launch) -> str:
    return f"{x.kernel} of {x.num_warps} warps, {x.num_stages} stages, {x.constexprs}"

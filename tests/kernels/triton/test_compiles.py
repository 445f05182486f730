"""Every Triton kernel compiles for sm_80 and sm_90, spills little if at all, fits in shared memory, loads by 16 bytes.

No GPU takes part: Triton's compiler and NVIDIA's assembler run in a process of their own (`triton_compile`), because
under the interpreter, which the other kernel tests use, a kernel is never compiled. The first run takes most of a
minute; later ones find unchanged kernels in Triton's cache.
"""

import pytest

from triton_compile import CHIPS, Compiled, Launch, compiled_apart, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from triton_cases import CASES, EXACT, MMA, WIDE, Case

CAPABILITIES = (80, 90)
# What may be put away: the assembler does it of its own accord, to fit one block more on an SM, with registers left.
OUTSIDE_BYTES = 64
LOOP_BYTES = 16
LIMIT_S = 400  # what compiling everything may take on a busy machine

pytestmark = pytest.mark.timeout(LIMIT_S + 20)  # the first test waits for all

SHOWN_BY = {WIDE: ("ld.global.v4", "cp.async.16"), MMA: ("mma.sync", "wgmma")}


@pytest.fixture(scope="module")
def everything() -> tuple[dict[tuple[str, int], Compiled], str]:
    return compiled_apart([_target(case) for case in CASES], CAPABILITIES, LIMIT_S)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles(case: Case, capability: int, everything: tuple[dict[tuple[str, int], Compiled], str]) -> None:
    found, said = everything
    compiled = found.get((_target(case), capability))
    assert compiled, f"the compiler's process ended before it came to this case:\n{said[-4000:]}"
    assert not compiled.error, compiled.error
    wrong = [f"{_told(x)}: {what}" for x in compiled.launches for what in (*_faults(x, case), *_missing(x, case))]
    assert not wrong, "\n".join(wrong)
    launched = [x.kernel for x in compiled.launches]
    assert set(case.expects) == set(launched), launched
    assert not case.once or len(launched) == len(set(launched)), "\n".join(map(_told, compiled.launches))


def _target(case: Case) -> str:
    return f"triton_cases:{case.name}"


def _faults(x: Launch, case: Case) -> list[str]:
    """What no kernel may show."""
    if x.error is not None:
        return [f"does not compile: {x.error}"]
    limit = CHIPS[x.capability].block_shared_kib * 1024
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

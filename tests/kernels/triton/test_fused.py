"""The elementwise kernels against plain torch in fp64: families, pages, chunks, padding, what they must not touch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from harness.lora_slots import Loaded, Slots
from harness.on_device import BF16, FP16, FP32, TOLERANCES, Rows, assert_close, assert_same, name_of, sized
from weft_bench.gpu_device import Gpu
from weft_kernels.plan import plan_rows
from weft_kernels.triton.chunks import NO_SLOT, PER_ROW, TURNS, chunk_table
from weft_kernels.triton.fused import add_norm, embed, rope_write, silu_mul
from weft_kernels.triton.lora import ChunkTable, DeferredExpand
from weft_kernels.triton.tables import Layout as LoraLayout
from weft_kernels.triton.tables import SiteShape
from weft_runner.model.cuda.executor import DECODE_CHUNK, PROMPT_CHUNK
from weft_runner.model.rotation import rotate

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, *sized(gpu=[FP16], interpreted=[])], ids=name_of)
EPS = 1e-5


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_stored(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` in fp64: nothing but the rounding of each number."""
    rounding = TOLERANCES[actual.dtype].stored
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=rounding, atol=min(rounding, 1e-5))


# ---- embed, add_norm


@DTYPES
@pytest.mark.parametrize("hidden", [16, 80, 1032, *sized(gpu=[4096, 5120], interpreted=[])])
def test_embed_reads_the_table_as_fp32(dtype: torch.dtype, hidden: int, device: torch.device) -> None:
    table, tokens = torch.randn(7, hidden).to(dtype), torch.tensor([6, 0, 3, 3, 5], dtype=torch.int32)
    residual = torch.empty(5, hidden, device=device)
    embed(residual, tokens.to(device), table.to(device))
    assert torch.equal(residual.cpu(), table[tokens.long()].float())


@DTYPES
@pytest.mark.parametrize("with_y", [True, False])
@pytest.mark.parametrize("hidden", [16, 80, 2048, *sized(gpu=[4096, 5120], interpreted=[])])
def test_add_norm_adds_and_norms(dtype: torch.dtype, with_y: bool, hidden: int, device: torch.device) -> None:
    before, weight = torch.randn(3, hidden) * torch.tensor([[1.0], [100.0], [0.0]]), torch.rand(hidden) + 0.5
    y = torch.randn(3, hidden).to(dtype) if with_y else None
    residual, x = before.to(device, copy=True), torch.empty(3, hidden, dtype=dtype, device=device)
    add_norm(x, residual, None if y is None else y.to(device), weight.to(device), EPS)

    expected = before if y is None else before + y.float()
    assert torch.equal(residual.cpu(), expected)
    assert_stored(x, norm(expected.double(), weight))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


# ---- rope_write

PAGE, LAYERS, MAX_POSITIONS = 4, 3, 40


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    normed: bool = False


FAMILIES = [Heads(2, 2, 16), Heads(4, 1, 32, normed=True), Heads(3, 1, 64), Heads(2, 1, 128, normed=True)]
FAMILIES_DTYPES = sized(
    gpu=[(family, dtype) for family in FAMILIES for dtype in (FP32, BF16, FP16)],
    interpreted=[*zip(FAMILIES, (FP32, FP32, BF16, BF16), strict=True)],
)
ONES = [(position, 1) for position in (0, 3, 4, 7, 8, 17)]  # rows in decode: (position, tokens)
STEPS = {
    "decode, one adapter": (ONES, [0] * 6),
    "decode, all different": (ONES, [0, 1, None, 2, 3, 4]),
    "two of each": (ONES, [0, 0, None, None, 1, 1]),
    "prefill from the start": ([(0, 20)], [0]),
    "prefill across pages": ([(3, 18), (6, 2)], [1, None]),
    "both": ([(5, 1), (2, 7), (0, PER_ROW - 1), (9, PER_ROW)], [None, 0, 1, 2]),
}
N_PADDING = 2


class Layout:
    """Rows on scattered pages, then padding tokens; one more row's worth of pages belongs to nobody."""

    def __init__(self, rows: list[tuple[int, int]], slots: list[int | None], block_m: int) -> None:
        used = [-(-(position + count) // PAGE) for position, count in rows]
        self.n_pages = sum(used) + 3
        free = torch.randperm(self.n_pages).tolist()
        self.table: list[list[int]] = []
        self.where: list[tuple[int, int]] = []  # (page, position) of each token
        self.pages: list[int] = []
        self.row_of: list[int] = []
        start = 0
        for row, ((position, count), n) in enumerate(zip(rows, used, strict=True)):
            pages = [free.pop() for _ in range(n)]
            self.table.append([start, start + count, position, len(self.pages)])
            self.pages += pages
            self.where += [(pages[p // PAGE], p) for p in range(position, position + count)]
            self.row_of += [row] * count
            start += count
        self.n_tokens = start
        self.row_of += [-1] * N_PADDING
        per_token = [slot for slot, (_, count) in zip(slots, rows, strict=True) for _ in range(count)]
        plan = plan_rows([*per_token, *[None] * N_PADDING], dict.fromkeys(range(9), 8))
        unused = torch.tensor([[NO_SLOT, 0, 0, 0], [3, 1, 0, 0]], dtype=torch.int32)
        self.chunks = torch.cat((torch.from_numpy(chunk_table(plan, block_m)), unused))


def rope_case(step: str, family: Heads, dtype: torch.dtype, block_m: int, layer: int, device: torch.device) -> None:
    layout = Layout(*STEPS[step], block_m)
    heads, kv_heads, dim = family.heads, family.kv_heads, family.dim
    n, padded = layout.n_tokens, layout.n_tokens + N_PADDING
    kv_before = torch.randn(layout.n_pages, LAYERS, 2, kv_heads, PAGE, dim).to(dtype)
    qkv, q_before = (
        torch.randn(padded, (heads + 2 * kv_heads) * dim).to(dtype),
        torch.randn(padded, heads, dim).to(dtype),
    )
    qkv[n:] = torch.nan
    angles = torch.rand(MAX_POSITIONS, dim // 2) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    q_norm, k_norm = (torch.rand(2, dim) + 0.5) if family.normed else (None, None)
    q, kv = q_before.to(device, copy=True), kv_before.to(device, copy=True)

    def put(x: list[list[int]] | list[int]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    rope_write(
        q,
        kv,
        qkv.to(device),
        put(layout.table),
        put(layout.pages),
        put(layout.row_of),
        ChunkTable(layout.chunks.to(device), block_m, len(layout.chunks)),
        cos_sin.to(device),
        layer=layer,
        q_norm=None if q_norm is None else q_norm.to(device),
        k_norm=None if k_norm is None else k_norm.to(device),
        eps=EPS,
        heads=heads,
    )

    page, position = torch.tensor(layout.where).unbind(1)
    cos, sin = cos_sin[position].double().repeat(1, 1, 2)[:, :, None].unbind(1)
    split = qkv[:n].double().view(n, -1, dim)
    wanted_q, wanted_k, wanted_v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        wanted_q, wanted_k = norm(wanted_q, q_norm), norm(wanted_k, k_norm)
    wanted_q, wanted_k = rotate(wanted_q, cos, sin), rotate(wanted_k, cos, sin)

    q, kv, offset = q.cpu(), kv.cpu(), position % PAGE
    assert_stored(q[:n], wanted_q)
    assert_stored(kv[page, layer, 0, :, offset], wanted_k)
    assert torch.equal(kv[page, layer, 1, :, offset].double(), wanted_v)
    kv[page, layer, :, :, offset] = kv_before[page, layer, :, :, offset]
    assert torch.equal(kv, kv_before), "something was written outside the tokens' places"
    assert torch.equal(q[n:], q_before[n:]), "a padding token's queries were written"


@pytest.mark.parametrize("step", STEPS)
def test_rope_write_puts_every_token_where_it_belongs(step: str, device: torch.device) -> None:
    rope_case(step, Heads(2, 1, 16, normed=True), torch.float32, 16, 1, device)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES_DTYPES, ids=name_of)
def test_rope_write_serves_all_families(family: Heads, dtype: torch.dtype, device: torch.device) -> None:
    rope_case("both", family, dtype, 16, 2, device)


@pytest.mark.parametrize("block_m", [32, 64, 128])
def test_rope_write_takes_larger_tiles(block_m: int, device: torch.device) -> None:
    rope_case("prefill from the start", Heads(2, 1, 32), torch.bfloat16, block_m, 0, device)


# ---- silu_mul


def turns_of(chunks: list[tuple[int, int]]) -> torch.Tensor:
    """The table of chunks (first token, tokens) of the base, of any size."""
    rows = [[NO_SLOT, *chunk, turn] for chunk in chunks for turn in range(TURNS if chunk[1] > 1 else 1)]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the gate of -10,000; its sigmoid is 0 all the same
@DTYPES
@pytest.mark.parametrize(("inner", "block_m"), [(48, 16), (200, 32), (72, 64)])
def test_silu_mul_gates(inner: int, block_m: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (torch.randn(30, 2 * inner) * 4).to(dtype)
    gate_up[0, :2] = torch.tensor([1e4, -1e4])
    sizes = [1, 2, 0, 3, 4, 15, 1]  # covers 26 of 30 tokens
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = turns_of([(at, size) for at, size in zip(first, sizes, strict=True)])
    before = torch.randn(30, inner).to(dtype)
    out = before.to(device, copy=True)
    silu_mul(out, gate_up.to(device), ChunkTable(chunks.to(device), block_m, len(sizes)))

    gate, up = gate_up[: sum(sizes)].double().chunk(2, dim=1)
    assert_stored(out[: sum(sizes)], torch.nn.functional.silu(gate) * up)
    assert torch.equal(out[sum(sizes) :].cpu(), before[sum(sizes) :])


@pytest.mark.parametrize(
    "count", sized(gpu=range(1, 21), interpreted=(1, 2, TURNS - 1, TURNS, TURNS + 1, 2 * TURNS, 20))
)
def test_silu_mul_takes_chunks_of_every_size(count: int, device: torch.device) -> None:
    gate_up, out = torch.randn(22, 32), torch.full((22, 16), 7.0, device=device)
    silu_mul(out, gate_up.to(device), ChunkTable(turns_of([(1, count)]).to(device), 32, 1))
    gate, up = gate_up[1 : 1 + count].double().chunk(2, dim=1)
    assert_stored(out[1 : 1 + count], torch.nn.functional.silu(gate) * up)
    assert (out[0] == 7.0).all()
    assert (out[1 + count :] == 7.0).all()


# ---- with adapters' parts still to be added

TOKENS_A_PAGE, MAX_RANK = 16, 64
N_IN = sized(gpu=1024, interpreted=64)  # of what was shrunk
RANKS = ((16, 16, 16), (8, None, 64), (None, 33, None), (64, 64, 64), (None, None, None))
MODELS = sized(
    gpu=(Heads(32, 8, 128), Heads(16, 16, 64, normed=True), Heads(16, 2, 32), Heads(8, 1, 128, normed=True)),
    interpreted=(Heads(2, 1, 16, normed=True),),
)
N, PROMPT = sized(gpu=(64, 300), interpreted=(5, 20))
SINGLE = [(7 * row % 90, 1) for row in range(N)]
MIXED: list[int | None] = [None if row % 5 == 4 else row % len(RANKS) for row in range(N)]
# what it is -> rows as (position, tokens), their slots, tokens of a chunk
BATCHES: dict[str, tuple[list[tuple[int, int]], list[int | None], int]] = {
    "rows of many adapters": (SINGLE, sorted(MIXED, key=lambda slot: -1 if slot is None else slot), DECODE_CHUNK),
    "rows of one adapter": (SINGLE, [0] * N, DECODE_CHUNK),
    "rows of the base": (SINGLE, [None] * N, DECODE_CHUNK),
    "a prompt and rows": ([(5, PROMPT), *SINGLE[:3]], [3, 1, None, 0], PROMPT_CHUNK),
}
# The interpreter computes in fp32 whatever the dtype: what is read and written in 16 bits is in the last of them.
BATCHES_DTYPES = sized(
    gpu=[(batch, dtype) for batch in BATCHES for dtype in (FP32, BF16, FP16)],
    interpreted=[*((batch, FP32) for batch in BATCHES), ("a prompt and rows", BF16)],
)
PENDING = [(*each, model) for each in BATCHES_DTYPES for model in (MODELS[:1] if each[1] == FP16 else MODELS)]


@dataclass(frozen=True, eq=False)
class Projected:
    """Rows of a step, the base's product, what adapters of its site have shrunk, and both together in fp64."""

    rows: Rows
    y: torch.Tensor
    pending: DeferredExpand | None  # as the engine leaves it; a step of the base has none
    expected: torch.Tensor

    @classmethod
    def made(cls, gpu: Gpu, batch: str, widths: tuple[int, ...], dtype: torch.dtype) -> "Projected":
        """Padding included, but in what is expected."""
        parts, slots, block_m = BATCHES[batch]
        rows = Rows.made(gpu.device, parts, slots, page_tokens=TOKENS_A_PAGE, block_m=block_m, padding=2)
        loaded = Loaded.made(gpu, LoraLayout(1, (SiteShape(N_IN, widths),), MAX_RANK), RANKS, dtype)
        x, y = (torch.randn(rows.here.shape.tokens, size, device=gpu.device).to(dtype) for size in (N_IN, sum(widths)))
        per_token: Slots = [slot for slot, (_, count) in zip(slots, parts, strict=True) for _ in range(count)]
        pending = None
        if any(slot is not None for slot in slots):
            pending = DeferredExpand(loaded.shrunk(x, rows.here.chunked, 0, 0), loaded.tables.at(0, 0))
        return cls(rows, y, pending, loaded.dense(y, x, per_token, 0, 0)[: len(rows.step.tokens)])


@pytest.mark.parametrize(("batch", "dtype", "heads"), PENDING, ids=name_of)
def test_rope_write_adds_what_adapters_have_pending(gpu: Gpu, batch: str, heads: Heads, dtype: torch.dtype) -> None:
    n_heads, kv_heads, dim = heads.heads, heads.kv_heads, heads.dim
    made = Projected.made(gpu, batch, (n_heads * dim, kv_heads * dim, kv_heads * dim), dtype)
    rows, here, tokens = made.rows, made.rows.here, len(made.rows.step.tokens)
    made.y[tokens:] = math.nan
    kv = torch.randn(rows.n_pages, 2, 2, kv_heads, TOKENS_A_PAGE, dim, device=gpu.device).to(dtype)
    q = torch.full((len(made.y), n_heads, dim), math.nan, device=gpu.device, dtype=dtype)
    norms = [torch.rand(dim, device=gpu.device) + 0.5 if heads.normed else None for _ in range(2)]
    angles = torch.rand(512, dim // 2, device=gpu.device) * 6
    cos_sin, before = torch.stack((angles.cos(), angles.sin()), dim=1), kv.clone()
    rope_write(
        q, kv, made.y, here.rows, here.pages, here.row_of, here.chunked, cos_sin, layer=1, q_norm=norms[0],
        k_norm=norms[1], eps=EPS, heads=n_heads, pending=made.pending,
    )  # fmt: skip
    turned = rotated(made.expected.view(tokens, -1, dim), heads, norms, cos_sin, rows)
    assert_close(q[:tokens], turned[:, :n_heads])
    assert_same(q[tokens:], torch.full_like(q[tokens:], math.nan))
    assert_written(kv, before, rows, turned[:, n_heads:])


def rotated(
    qkv: torch.Tensor, heads: Heads, norms: Sequence[torch.Tensor | None], cos_sin: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """[T, heads + 2 N, D] in fp64: q and k normed and rotated, v as it is."""
    positions = torch.cat([torch.arange(row.position, row.context) for row in rows.step.rows]).to(qkv.device)
    q, k, v = qkv.split([heads.heads, heads.kv_heads, heads.kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        q, k = norm(q, norms[0]), norm(k, norms[1])
    cos, sin = cos_sin[positions].double().repeat(1, 1, 2)[:, :, None].unbind(1)
    return torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v), dim=1)


def assert_written(kv: torch.Tensor, before: torch.Tensor, rows: Rows, expected: torch.Tensor) -> None:
    """Keys and values [T, 2 N, D] at their pages in layer 1, and nothing else anywhere."""
    places = [
        (row.pages[position // TOKENS_A_PAGE], position % TOKENS_A_PAGE)
        for row in rows.step.rows
        for position in range(row.position, row.context)
    ]
    page, inside = torch.tensor(places, device=kv.device).unbind(1)
    assert_close(kv[page, 1, :, :, inside].flatten(1, 2), expected)
    kv[page, 1, :, :, inside] = before[page, 1, :, :, inside]
    assert_same(kv, before)


@pytest.mark.parametrize(("batch", "dtype"), BATCHES_DTYPES, ids=name_of)
@pytest.mark.parametrize("inner", sized(gpu=(1040, 14336), interpreted=(48,)))
def test_silu_mul_adds_what_adapters_have_pending(gpu: Gpu, batch: str, inner: int, dtype: torch.dtype) -> None:
    made, tokens = Projected.made(gpu, batch, (inner, inner), dtype), sum(count for _, count in BATCHES[batch][0])
    out = torch.full((len(made.y), inner), math.nan, device=gpu.device, dtype=dtype)
    silu_mul(out, made.y, made.rows.here.chunked, pending=made.pending)
    gate, up = made.expected.chunk(2, dim=1)
    assert_close(out[:tokens], torch.nn.functional.silu(gate) * up)
    assert_same(out[tokens:], torch.full_like(out[tokens:], math.nan))

"""The elementwise kernels against plain torch in fp64: families, pages, chunks, padding, what they must not touch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from harness.lora_slots import Loaded, Slots
from harness.on_device import BF16, FP16, FP32, INTERPRETED, TOLERANCES, Rows, assert_close, assert_same, name_of, sized
from weft_kernels.triton import chunks, fused, lora, tables
from weft_stage.gpu_device import Gpu

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
    fused.embed(residual, tokens.to(device), table.to(device))
    assert torch.equal(residual.cpu(), table[tokens.long()].float())


@pytest.mark.numeric
@DTYPES
@pytest.mark.parametrize("with_y", [True, False])
@pytest.mark.parametrize("hidden", [16, 80, 2048, *sized(gpu=[4096, 5120], interpreted=[])])
def test_add_norm_adds_and_norms(dtype: torch.dtype, with_y: bool, hidden: int, device: torch.device) -> None:
    before, weight = torch.randn(3, hidden) * torch.tensor([[1.0], [100.0], [0.0]]), torch.rand(hidden) + 0.5
    y = torch.randn(3, hidden).to(dtype) if with_y else None
    residual, x = before.to(device, copy=True), torch.empty(3, hidden, dtype=dtype, device=device)
    fused.prepare_add_norm(residual, EPS)(x, None if y is None else y.to(device), weight.to(device))

    expected = before if y is None else before + y.float()
    assert torch.equal(residual.cpu(), expected)
    assert_stored(x, norm(expected.double(), weight))


@pytest.mark.numeric
@DTYPES
def test_without_a_weight_nothing_is_normed(dtype: torch.dtype, device: torch.device) -> None:
    before, y = torch.randn(3, 80), torch.randn(3, 80).to(dtype)
    residual, x = before.to(device, copy=True), torch.empty(3, 80, dtype=dtype, device=device)
    fused.prepare_add_norm(residual, EPS, 0.5)(x, y.to(device), None)
    assert torch.equal(residual.cpu(), before + 0.5 * y.float())
    assert_stored(x, (before + 0.5 * y.float()).double())


@pytest.mark.numeric
@DTYPES
@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_norm_reads_its_input_alone(dtype: torch.dtype, layer_norm: bool, device: torch.device) -> None:
    y, weight = (10 + 3 * torch.randn(3, 80)).to(dtype), torch.randn(2, 80)
    x = torch.empty(3, 80, dtype=dtype, device=device)
    of = weight if layer_norm else weight[0]
    fused.prepare_norm(y, EPS, layer_norm=layer_norm)(x, y.to(device), of.to(device))
    assert_stored(x, layer_normed(y.double(), weight) if layer_norm else norm(y.double(), weight[0]))


@pytest.mark.numeric
@DTYPES
def test_layer_norm_comes_after_what_is_added(dtype: torch.dtype, device: torch.device) -> None:
    before, y, weight = 5 + torch.randn(3, 80), torch.randn(3, 80).to(dtype), torch.randn(2, 80)
    residual, x = before.to(device, copy=True), torch.empty(3, 80, dtype=dtype, device=device)
    fused.prepare_add_norm(residual, EPS, layer_norm=True)(x, y.to(device), weight.to(device))
    assert_stored(x, layer_normed((before + y.float()).double(), weight))


@pytest.mark.numeric
@DTYPES
def test_norm_heads_norms_all_heads_of_a_token_together(dtype: torch.dtype, device: torch.device) -> None:
    qkv, weights = torch.randn(3, 7 * 48).to(dtype), (torch.rand(3 * 48) + 0.5, torch.rand(2 * 48) + 0.5)
    there, (q, k, v) = qkv.to(device, copy=True), qkv.double().split([3 * 48, 2 * 48, 2 * 48], dim=1)
    fused.prepare_norm_heads(there, 3, 2, EPS)(there, *(weight.to(device) for weight in weights))
    assert_stored(there, torch.cat((norm(q, weights[0]), norm(k, weights[1]), v), dim=1))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def layer_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:], weight[0].double(), weight[1].double(), EPS)


# ---- gate


def activated(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    return torch.nn.functional.silu(x) if activation == "silu" else torch.nn.functional.gelu(x, approximate="tanh")


def turns_of(parts: list[tuple[int, int]]) -> torch.Tensor:
    """The table of chunks (first token, tokens) of the base, of any size."""
    rows = [[chunks.NO_SLOT, *chunk, turn] for chunk in parts for turn in range(chunks.TURNS if chunk[1] > 1 else 1)]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the gate of -10,000; its sigmoid is 0 all the same
def gate(
    out: torch.Tensor, gate_up: torch.Tensor, chunked: lora.ChunkTable, pending: lora.DeferredExpand | None = None,
    activation: str = "silu",
) -> None:  # fmt: skip
    launch = fused.prepare_gate(out, gate_up, chunked, pending, activation=activation)
    launch(out, gate_up, *lora.expand_arguments(pending))


@pytest.mark.numeric
@DTYPES
@pytest.mark.parametrize(
    ("inner", "block_m", "activation", "gated"),
    [(48, 16, "silu", True), (200, 32, "gelu", True), (72, 64, "silu", True), (72, 16, "gelu", False)],
)
def test_gate_gates(
    inner: int, block_m: int, activation: str, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """`gated` False: what is activated is all there is."""
    gate_up = (torch.randn(30, (1 + gated) * inner) * 4).to(dtype)
    gate_up[0, :2] = torch.tensor([1e4, -1e4])
    sizes = [1, 2, 0, 3, 4, 15, 1]  # covers 26 of 30 tokens
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = turns_of([(at, size) for at, size in zip(first, sizes, strict=True)])
    before = torch.randn(30, inner).to(dtype)
    out = before.to(device, copy=True)
    chunked = lora.ChunkTable(chunks.to(device), block_m, len(sizes))
    gate(out, gate_up.to(device), chunked, activation=activation)

    wanted = activated(gate_up[: sum(sizes), :inner].double(), activation)
    assert_stored(out[: sum(sizes)], wanted * gate_up[: sum(sizes), inner:].double() if gated else wanted)
    assert torch.equal(out[sum(sizes) :].cpu(), before[sum(sizes) :])


@pytest.mark.numeric
@pytest.mark.parametrize(
    "count",
    sized(gpu=range(1, 21), interpreted=(1, 2, chunks.TURNS - 1, chunks.TURNS, chunks.TURNS + 1, 2 * chunks.TURNS, 20)),
)
def test_gate_takes_chunks_of_every_size(count: int, device: torch.device) -> None:
    gate_up, out = torch.randn(22, 32), torch.full((22, 16), 7.0, device=device)
    gate(out, gate_up.to(device), lora.ChunkTable(turns_of([(1, count)]).to(device), 32, 1))
    first, second = gate_up[1 : 1 + count].double().chunk(2, dim=1)
    assert_stored(out[1 : 1 + count], activated(first) * second)
    assert (out[0] == 7.0).all()
    assert (out[1 + count :] == 7.0).all()


# ---- with adapters' parts still to be added

TOKENS_A_PAGE, MAX_RANK = 16, 64
DECODE_CHUNK, PROMPT_CHUNK = 16, 64  # most tokens of a chunk, as the engine has them


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    normed: bool = False
    rotated: int = 0  # of each head, its first numbers; 0: all
    long: bool = False  # every other row is a long text
    growth: tuple[float, int] = (0.0, 1)


N_IN = sized(gpu=1024, interpreted=64)  # of what was shrunk
RANKS = ((16, 16, 16), (8, None, 64), (None, 33, None), (64, 64, 64), (None, None, None))
MODELS = sized(
    gpu=(
        Heads(32, 8, 128),
        Heads(16, 16, 64, normed=True),
        Heads(16, 2, 32),
        Heads(8, 1, 128, normed=True),
        Heads(32, 32, 96),
        Heads(8, 2, 80, normed=True, growth=(0.1, 16)),
        Heads(24, 8, 128, rotated=96, long=True),
    ),
    interpreted=(
        Heads(2, 1, 16, normed=True),
        Heads(4, 1, 32),
        Heads(3, 1, 64),
        Heads(2, 2, 128, normed=True),
        Heads(4, 2, 48, normed=True, growth=(0.5, 4)),
        Heads(2, 2, 32, rotated=24, long=True),
        Heads(1, 1, 80, normed=True, rotated=20),
    ),
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
ALL_FAMILIES = (FP32, BF16) if not INTERPRETED else (BF16,)
PENDING = [(*each, model) for each in BATCHES_DTYPES for model in (MODELS if each[1] in ALL_FAMILIES else MODELS[:1])]


@dataclass(frozen=True, eq=False)
class Projected:
    """Rows of a step, the base's product, what adapters of its site have shrunk, and both together in fp64."""

    rows: Rows
    y: torch.Tensor
    pending: lora.DeferredExpand | None  # as the engine leaves it; a step of the base has none
    expected: torch.Tensor

    @classmethod
    def made(cls, gpu: Gpu, batch: str, widths: tuple[int, ...], dtype: torch.dtype) -> "Projected":
        """Padding included, but in what is expected."""
        parts, slots, block_m = BATCHES[batch]
        rows = Rows.made(gpu.device, parts, slots, page_tokens=TOKENS_A_PAGE, block_m=block_m, padding=2)
        loaded = Loaded.made(gpu, tables.Layout(1, (tables.SiteShape(N_IN, widths),), MAX_RANK), RANKS, dtype)
        x, y = (torch.randn(rows.here.shape.tokens, size, device=gpu.device).to(dtype) for size in (N_IN, sum(widths)))
        per_token: Slots = [slot for slot, (_, count) in zip(slots, parts, strict=True) for _ in range(count)]
        pending = None
        if any(slot is not None for slot in slots):
            pending = lora.DeferredExpand(loaded.shrunk(x, rows.here.chunked, 0, 0), loaded.tables.at(0, 0))
        return cls(rows, y, pending, loaded.dense(y, x, per_token, 0, 0)[: len(rows.step.tokens)])


@pytest.mark.numeric
@pytest.mark.parametrize(("batch", "dtype", "heads"), PENDING, ids=name_of)
def test_rope_write_adds_what_adapters_have_pending(gpu: Gpu, batch: str, heads: Heads, dtype: torch.dtype) -> None:
    n_heads, kv_heads, dim = heads.heads, heads.kv_heads, heads.dim
    made = Projected.made(gpu, batch, (n_heads * dim, kv_heads * dim, kv_heads * dim), dtype)
    rows, here, tokens = made.rows, made.rows.here, len(made.rows.step.tokens)
    made.y[tokens:] = math.nan
    kv = torch.randn(rows.n_pages, 2, 2, kv_heads, TOKENS_A_PAGE, dim, device=gpu.device).to(dtype)
    q = torch.full((len(made.y), n_heads, dim), math.nan, device=gpu.device, dtype=dtype)
    norms = [torch.rand(dim, device=gpu.device) + 0.5 if heads.normed else None for _ in range(2)]
    angles = torch.rand(512, (heads.rotated or dim) // 2, device=gpu.device) * 6
    cos_sin, before = torch.stack((angles.cos(), angles.sin()), dim=1), kv.clone()
    long = torch.arange(len(here.rows), dtype=torch.int32, device=gpu.device) % 2 if heads.long else None
    fused.prepare_rope_write(
        q, kv, made.y, here.rows, here.pages, here.row_of, here.chunked, cos_sin, long, EPS, made.pending,
        heads.growth,
    )(q, made.y, *norms, 1, *lora.expand_arguments(made.pending))  # fmt: skip
    turned = rotated(made.expected.view(tokens, -1, dim), heads, norms, cos_sin, rows)
    assert_close(q[:tokens], turned[:, :n_heads])
    assert_same(q[tokens:], torch.full_like(q[tokens:], math.nan))
    assert_written(kv, before, rows, turned[:, n_heads:])


def rotated(
    qkv: torch.Tensor, heads: Heads, norms: Sequence[torch.Tensor | None], cos_sin: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """[T, heads + 2 N, D] in fp64: q and k normed and rotated, v as it is."""
    q, k, v = qkv.split([heads.heads, heads.kv_heads, heads.kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        q, k = norm(q, norms[0]), norm(k, norms[1])
    spans = [torch.arange(row.position, row.context) for row in rows.step.rows]
    grown = 1 + heads.growth[0] * torch.log1p(torch.cat(spans).div(heads.growth[1], rounding_mode="floor").double())
    q = q * grown[:, None, None].to(q.device)
    if heads.long:
        spans = [2 * span + i % 2 for i, span in enumerate(spans)]
    positions = torch.cat(spans).to(qkv.device)
    cos, sin = cos_sin[positions].double().repeat(1, 1, 2)[:, :, None].unbind(1)
    return torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v), dim=1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first numbers of x [T, heads, D]: halves are paired, not neighbours."""
    x, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((x * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


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


@pytest.mark.numeric
@pytest.mark.parametrize(("batch", "dtype"), BATCHES_DTYPES, ids=name_of)
@pytest.mark.parametrize("inner", sized(gpu=(1040, 14336), interpreted=(48,)))
@pytest.mark.parametrize("gated", [True, False])
def test_gate_adds_what_adapters_have_pending(
    gpu: Gpu, batch: str, gated: bool, inner: int, dtype: torch.dtype
) -> None:
    widths = (inner,) * (1 + gated)
    made, tokens = Projected.made(gpu, batch, widths, dtype), sum(count for _, count in BATCHES[batch][0])
    out = torch.full((len(made.y), inner), math.nan, device=gpu.device, dtype=dtype)
    gate(out, made.y, made.rows.here.chunked, made.pending)
    wanted = activated(made.expected[:, :inner])
    assert_close(out[:tokens], wanted * made.expected[:, inner:] if gated else wanted)
    assert_same(out[tokens:], torch.full_like(out[tokens:], math.nan))

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Tokens sampled on the device: `argmax` and `DeviceSampler.draw` give what the samplers on the host give, bit for bit.

What is drawn is stated in `weft_runner.model.sampling`: a token's mass is a whole number, round(2^b * exp((x - largest)
/ temperature)), with an exp made of float64 multiplications and additions in a fixed order. So here: nothing is
compiled into fused multiply-adds, and sums of integers are exact in any order, atomics or not.

**Without a sort.** Tokens go into bins by their exponent, 1 / PER_NAT wide, the likeliest first: all tokens of a bin
come before those of the next. One program a row finds the bin that holds a position in the mass (`_aim`); the whole
device lists the bin's tokens (`_collect`), some hundreds of them for a language model; and one program a row finds the
token among them (`_find`), by bisection on a number that has the order of (logit, id), so that ties need no care. top_p
takes the three of them once more, for the mass that is kept. A program ends at once where its row does not need it;
none waits for the host, and how many launches there are depends on `nucleus` alone.

A row of logits is split over programs, SHARE tokens each. V tokens, B rows; float32 logits [B, V] with unit stride
inside a row.
"""

import torch
import triton
import triton.language as tl

from weft_kernels.triton.prepared import PreparedKernel, cdiv, next_power_of_2, prepared

SHARE = 2048
SHIFTED = 128  # shifts of a program
BINS = 1024
PER_NAT = 32  # 1,024 bins hold exponents to -32, as far as masses of 47 bits go; what is beyond is in the last one
LISTED = 8192  # tokens of a bin that are listed; of more (a flat row, a high temperature) all V are searched
BIN_TOKENS = 1024  # of a bin's tokens at once: commonly all of them, and they stay in registers

_PER_NAT = tl.constexpr(float(PER_NAT))
_INFINITE = tl.constexpr(0x7F800000)
_IMPOSSIBLE = tl.constexpr(float("-inf"))
_NAN = tl.constexpr(0x7FFFFFFF)
_NEVER = tl.constexpr(-(2**63))
_FOREVER = tl.constexpr(2**63 - 1)
_SHARPEST = tl.constexpr(1e300)  # largest 1 / temperature: finite
_FLOOR = tl.constexpr(-64.0)  # exponents below are far below half a unit
_LOG2E = tl.constexpr(float.fromhex("0x1.71547652b82fep+0"))
_LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42feep-1"))
_LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
_ROUND = tl.constexpr(float.fromhex("0x1.8p+52"))  # adding it rounds to an integer, half to even


def argmax(logits: torch.Tensor, tokens: torch.Tensor, peaks: torch.Tensor) -> None:
    """Find each row's likeliest token, the lowest id among equals, and its logit: int32 [B], float32 [B].

    -1 for a row whose largest logit is not finite, or that holds a NaN (its peak is NaN then).
    """
    n_rows, vocab = _sizes(logits)
    shares = cdiv(vocab, SHARE)
    best = torch.empty((n_rows, shares), dtype=torch.int64, device=logits.device)
    common = {"ID_BITS": vocab.bit_length(), "enable_fp_fusion": False}
    of_shares = prepared(_likeliest_of_shares, V=vocab, SHARE=SHARE, num_warps=4, **common)
    of_shares((shares, n_rows, 1), best, logits, logits.stride(0))
    of_rows = prepared(_likeliest, SHARES=shares, BLOCK=next_power_of_2(shares), num_warps=1, **common)
    of_rows((n_rows, 1, 1), tokens, peaks, best)


def shift(
    shifted: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    values: torch.Tensor,
    scaled: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write shifted = logits, but for x = logits[rows[i], tokens[i]], in float64 and rounded to float32 at the end.

    There it is x + values[i]; with `scaled`, biases and scales, y = x + biases[i] is divided by scales[i] where it is
    positive and multiplied where it is not before that. rows, tokens int32 [n], the others float64 [n]; no (row, token)
    comes twice. Negative rows are padding, and tokens outside the vocabulary are passed over.
    """
    _, vocab = _sizes(logits)
    shifted.copy_(logits)
    biases, scales = scaled or (values, values)
    kernel = prepared(_shift, V=vocab, SCALED=scaled is not None, BLOCK=SHIFTED, num_warps=4, enable_fp_fusion=False)
    kernel(
        (cdiv(len(rows), SHIFTED), 1, 1), shifted, logits, shifted.stride(0), logits.stride(0), rows, tokens, values,
        biases, scales, len(rows),
    )  # fmt: skip


def mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Write logits[rows[i], token] = -inf for each token whose bit of words[i] is not set, in place.

    rows int32 [n], words int32 [n, ceil(V / 32)]: bit token % 32 of word token / 32.
    """
    _, vocab = _sizes(logits)
    assert words.shape == (len(rows), cdiv(vocab, 32)), words.shape
    kernel = prepared(_mask, V=vocab, SHARE=SHARE, num_warps=4)
    kernel((cdiv(vocab, SHARE), len(rows), 1), logits, logits.stride(0), rows, words, words.stride(0))


def truncate(
    logits: torch.Tensor, temperature: torch.Tensor, least: torch.Tensor | None, top_k: torch.Tensor | None, most: int
) -> torch.Tensor:
    """Copy logits [B, V] with -inf in place of what min_p and top_k do not keep, nothing for the host to wait for.

    temperature, least float64 [B]: temperatures above 0, and the least exponent that is kept, log(min_p), which may be
    -inf. top_k int64 [B]: within 0 (all of V) and `most`, 1..V; the lower ids first among equals. A row that has NaN or
    infinity keeps it, so that it has no token.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    if least is not None:
        peaks = logits.max(dim=-1, keepdim=True).values
        inverse = (1.0 / temperature).clamp(max=_SHARPEST.value)
        kept = ~((logits.double() - peaks.double()) * inverse[:, None] < least[:, None])
    if top_k is not None:
        wanted = top_k[:, None]
        last = torch.topk(logits, most).values.gather(1, (wanted - 1).clamp(min=0))
        above, equal = ~(logits <= last), logits == last
        kept &= (wanted == 0) | above | (equal & (equal.cumsum(-1) <= wanted - above.sum(-1, keepdim=True)))
    return torch.where(kept, logits, -torch.inf)


class DeviceSampler:
    """Draws for up to `max_rows` rows at once. It owns the scratch, 40 KiB a row, so draws go one after the other."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device, listed: int = LISTED) -> None:
        self._vocab = vocab
        self._peaks = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._bins = torch.empty((max_rows, BINS), dtype=torch.int64, device=device)
        self._aims = torch.empty((max_rows, 4), dtype=torch.int64, device=device)
        self._kept = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._listed = torch.empty((max_rows, listed), dtype=torch.int32, device=device)
        sizes = {"V": vocab, "BINS": BINS, "enable_fp_fusion": False}
        masses = {"MASS_BITS": min(51, 63 - vocab.bit_length())}  # the sum over a whole vocabulary stays below 2^63
        self._weigh = PreparedKernel(_weigh, SHARE=SHARE, num_warps=8, **sizes, **masses)
        self._aim_at_nucleus, self._aim_at_draw = (
            PreparedKernel(_aim, DRAW=is_draw, BINS=BINS, num_warps=4, enable_fp_fusion=False)
            for is_draw in (False, True)
        )
        self._collect = PreparedKernel(_collect, SHARE=SHARE, LISTED=listed, num_warps=8, **sizes)
        self._find = PreparedKernel(
            _find, ID_BITS=vocab.bit_length(), BLOCK=BIN_TOKENS, LISTED=listed, num_warps=4, **sizes, **masses
        )

    def draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        bits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        *,
        nucleus: bool = True,
    ) -> None:
        """Draw a token for each row, -1 as in `argmax`: tokens int32 [B]. Rows of temperature 0 get the likeliest one.

        bits int64 [B]: 53 random bits, those of `model.sampling.draw_bits`. temperature, top_p float64 [B]. `nucleus`:
        some top_p may be below 1; three launches are saved where the host knows better.
        """
        n_rows, vocab = _sizes(logits)
        assert vocab == self._vocab, (vocab, self._vocab)
        assert n_rows <= len(self._peaks), (n_rows, len(self._peaks))
        assert bits.dtype == torch.int64, bits.dtype
        assert temperature.dtype == top_p.dtype == torch.float64, (temperature.dtype, top_p.dtype)
        argmax(logits, tokens, self._peaks[:n_rows])
        self._bins[:n_rows].zero_()
        row = (logits, logits.stride(0), self._peaks, temperature)
        shares, rows = (cdiv(vocab, SHARE), n_rows, 1), (n_rows, 1, 1)
        self._weigh(shares, self._bins, tokens, *row)
        for aim in (self._aim_at_nucleus, self._aim_at_draw) if nucleus else (self._aim_at_draw,):
            aim(rows, self._aims, self._kept, self._bins, tokens, temperature, top_p, bits)
            self._collect(shares, self._listed, self._aims, *row)
            self._find(rows, tokens, self._kept, self._listed, self._aims, *row)


def _sizes(logits: torch.Tensor) -> tuple[int, int]:
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    n_rows, vocab = logits.shape
    return n_rows, vocab


# ---- order


@triton.jit
def _key(x):
    """A float32 as an int32 in the same order; both zeros are one, NaN is above everything."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > _INFINITE, _NAN, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def _value(key):
    magnitude = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def _rank(x, token, ID_BITS: tl.constexpr):
    """int64, larger for what is likelier: by logit, then the lower id first. No two tokens have the same."""
    return (_key(x).to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - token)


@triton.jit
def _token_of(rank, ID_BITS: tl.constexpr):
    mask: tl.constexpr = (1 << ID_BITS) - 1
    return (mask - (rank & mask)).to(tl.int32)


# ---- the likeliest


@triton.jit
def _likeliest_of_shares(best, logits, stride, V: tl.constexpr, ID_BITS: tl.constexpr, SHARE: tl.constexpr):
    row = tl.program_id(1)
    token = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < V, other=0.0)
    rank = tl.where(token < V, _rank(x, token, ID_BITS), _NEVER)
    tl.store(best + row * tl.num_programs(0) + tl.program_id(0), tl.max(rank, 0))


@triton.jit
def _likeliest(tokens, peaks, best, SHARES: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    share = tl.arange(0, BLOCK)
    rank = tl.max(tl.load(best + row * SHARES + share, mask=share < SHARES, other=_NEVER), 0)
    key = (rank >> ID_BITS).to(tl.int32)
    tl.store(tokens + row, tl.where(tl.abs(key) < _INFINITE, _token_of(rank, ID_BITS), -1))
    tl.store(peaks + row, _value(key))


@triton.jit(do_not_specialize=["n"])
def _shift(
    shifted, logits, to_stride, stride, rows, tokens, values, biases, scales, n,
    V: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < n, other=-1)
    token = tl.load(tokens + i, mask=i < n, other=-1)
    inside = (row >= 0) & (token >= 0) & (token < V)
    value = tl.load(values + i, mask=inside, other=0.0)
    y = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=0.0).to(tl.float64)
    if SCALED:
        y += tl.load(biases + i, mask=inside, other=0.0)
        scale = tl.load(scales + i, mask=inside, other=1.0)
        y = tl.where(y > 0.0, y / scale, y * scale)
    tl.store(shifted + row.to(tl.int64) * to_stride + token, (y + value).to(tl.float32), mask=inside)


@triton.jit
def _mask(logits, stride, rows, words, words_stride, V: tl.constexpr, SHARE: tl.constexpr):
    i = tl.program_id(1)
    row = tl.load(rows + i)
    token = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    bits = tl.load(words + i * words_stride + token // 32, mask=token < V, other=0)
    masked = (token < V) & (((bits >> (token % 32)) & 1) == 0)
    tl.store(logits + row.to(tl.int64) * stride + token, tl.full(token.shape, _IMPOSSIBLE, tl.float32), mask=masked)


# ---- masses


@triton.jit
def _exponent(x, peak, temperature):
    """(x - peak) / temperature as the host has it, float64, in [-64, 0]."""
    inverse = tl.minimum(1.0 / temperature, _SHARPEST)
    return tl.maximum((x.to(tl.float64) - peak.to(tl.float64)) * inverse, _FLOOR)


@triton.jit
def _mass(y, MASS_BITS: tl.constexpr):
    """round(2^MASS_BITS * exp(y)): Cody and Waite's reduction, Taylor's polynomial; the host's operations, in order."""
    k = (y * _LOG2E + _ROUND) - _ROUND
    r = (y - k * _LN2_HIGH) - k * _LN2_LOW
    p = (1.0 / 479001600.0) * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((k.to(tl.int64) + (1023 + MASS_BITS)) << 52).to(tl.float64, bitcast=True)  # 2^(k + MASS_BITS)
    return ((p * power + _ROUND) - _ROUND).to(tl.int64)


@triton.jit
def _bin(y, BINS: tl.constexpr):
    return tl.minimum((-y * _PER_NAT).to(tl.int32), BINS - 1)


@triton.jit
def _weigh(
    bins, tokens, logits, stride, peaks, temperature,
    V: tl.constexpr, BINS: tl.constexpr, MASS_BITS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """bins [B, BINS] += the masses of this share's tokens."""
    row = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0.0 and tl.load(tokens + row) >= 0:
        token = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < V, other=_IMPOSSIBLE)
        y = _exponent(x, tl.load(peaks + row), heat)
        mass = _mass(y, MASS_BITS)
        tl.atomic_add(bins + row * BINS + _bin(y, BINS), mass, mask=(token < V) & (mass > 0), sem="relaxed")


# ---- a position in the mass: its bin, the bin's tokens, the token


@triton.jit
def _aim(aims, kept, bins, tokens, temperature, top_p, bits, DRAW: tl.constexpr, BINS: tl.constexpr):
    """aims [B, 4]: the bin that holds the position looked for, the mass before that bin, the position, tokens listed.

    Bin -1: nothing is looked for in this row. DRAW: the position where the draw falls in the mass that is kept; else
    the last one that top_p needs.
    """
    row = tl.program_id(0)
    mass = tl.load(bins + row * BINS + tl.arange(0, BINS))
    total = tl.sum(mass, 0)
    p = tl.load(top_p + row)
    wanted = tl.load(temperature + row) > 0.0 and tl.load(tokens + row) >= 0
    if DRAW:
        whole = total
        if p < 1.0:
            whole = tl.load(kept + row)
        position = _part(tl.load(bits + row), whole)
    else:
        wanted = wanted and p < 1.0
        needed = tl.ceil(p * total.to(tl.float64)).to(tl.int64)
        position = tl.maximum(tl.minimum(needed, total), 1) - 1
    passed = tl.cumsum(mass, 0) <= position
    aim = tl.sum(passed.to(tl.int32), 0)
    tl.store(aims + row * 4, tl.where(wanted, aim, -1))
    tl.store(aims + row * 4 + 1, tl.sum(tl.where(passed, mass, 0), 0))
    tl.store(aims + row * 4 + 2, position)
    tl.store(aims + row * 4 + 3, 0)


@triton.jit
def _part(bits, mass):
    """floor(bits * mass / 2^53), of a product of 116 bits."""
    bits, mass = bits.to(tl.uint64), mass.to(tl.uint64)
    return ((tl.umulhi(bits, mass) << 11) | ((bits * mass) >> 53)).to(tl.int64)


@triton.jit
def _collect(
    listed, aims, logits, stride, peaks, temperature,
    V: tl.constexpr, BINS: tl.constexpr, SHARE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """listed [B, LISTED]: the tokens of the bin aimed at, in any order, as far as there is room. All are counted."""
    row = tl.program_id(1)
    aim = tl.load(aims + row * 4)
    if aim >= 0:
        token = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < V, other=_IMPOSSIBLE)
        y = _exponent(x, tl.load(peaks + row), tl.load(temperature + row))
        member = (token < V) & (_bin(y, BINS) == aim)
        count = aims + row * 4 + 3 + tl.zeros_like(token)
        place = tl.atomic_add(count, tl.full(token.shape, 1, tl.int64), mask=member, sem="relaxed")
        tl.store(listed + row * LISTED + place, token, mask=member & (place < LISTED))


@triton.jit
def _find(
    tokens, kept, listed, aims, logits, stride, peaks, temperature,
    V: tl.constexpr, BINS: tl.constexpr, MASS_BITS: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """The token that covers the position aimed at, and the mass through it.

    Let G(rank) be the mass of the tokens of that rank and above: the token's rank is the largest with G > position.
    """
    row = tl.program_id(0)
    aim = tl.load(aims + row * 4)
    if aim >= 0:
        before = tl.load(aims + row * 4 + 1)
        position = tl.load(aims + row * 4 + 2)
        count = tl.load(aims + row * 4 + 3).to(tl.int32)
        n = tl.where(count > LISTED, V, count)
        here = logits + row.to(tl.int64) * stride
        bin_ = listed + row * LISTED
        peak = tl.load(peaks + row)
        heat = tl.load(temperature + row)
        rank, mass = _members(bin_, count, 0, here, peak, heat, aim, V, BINS, MASS_BITS, ID_BITS, BLOCK, LISTED)
        low = tl.min(tl.where(mass > 0, rank, _FOREVER), 0)
        high = tl.max(rank, 0)
        through = before + tl.sum(mass, 0)
        for start in range(BLOCK, n, BLOCK):
            more, its = _members(bin_, count, start, here, peak, heat, aim, V, BINS, MASS_BITS, ID_BITS, BLOCK, LISTED)
            low = tl.minimum(low, tl.min(tl.where(its > 0, more, _FOREVER), 0))
            high = tl.maximum(high, tl.max(more, 0))
            through += tl.sum(its, 0)
        high += 1
        # through = G(low) > position >= G(high)
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)  # their mean, where the sum would overflow
            reached = before + tl.sum(tl.where(rank >= middle, mass, 0), 0)
            for start in range(BLOCK, n, BLOCK):
                more, its = _members(
                    bin_, count, start, here, peak, heat, aim, V, BINS, MASS_BITS, ID_BITS, BLOCK, LISTED
                )
                reached += tl.sum(tl.where(more >= middle, its, 0), 0)
            if reached > position:
                low = middle
                through = reached
            else:
                high = middle
        tl.store(tokens + row, _token_of(low, ID_BITS))
        tl.store(kept + row, through)


@triton.jit
def _members(
    listed, count, start, logits, peak, temperature, aim,
    V: tl.constexpr, BINS: tl.constexpr, MASS_BITS: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Ranks and masses of the bin's tokens among the next BLOCK of the list, or of the row; others: _NEVER and 0."""
    at = start + tl.arange(0, BLOCK)
    of_list = tl.load(listed + at, mask=(at < count) & (at < LISTED), other=0)
    token = tl.where(count > LISTED, at, of_list)
    inside = at < tl.where(count > LISTED, V, count)
    x = tl.load(logits + token, mask=inside, other=_IMPOSSIBLE)
    y = _exponent(x, peak, temperature)
    member = inside & (_bin(y, BINS) == aim)
    return tl.where(member, _rank(x, token, ID_BITS), _NEVER), tl.where(member, _mass(y, MASS_BITS), 0)

"""What `make gpu-bench` runs: models by shape, batches by popularity, operators, and how much of each. Pure."""

from dataclasses import dataclass

from weft_bench.cpu_shapes import (
    BASE,
    DISTINCT,
    IDENTICAL,
    POPULARITIES,
    RANK,
    SKEWED,
    UNIFORM,
    adapter_of_row,
    distinct,
    ranks_of,
)
from weft_bench.roofline import Work
from weft_stage.shapes import BF16_BYTES, Shape

SHAPES = {
    "8B": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336, vocab=128256),  # Llama 3.1 8B
    "7B": Shape(hidden=4096, layers=32, heads=32, kv_heads=32, inner=11008, vocab=32000),  # Llama 2 7B, Punica's
    "1B": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, inner=8192, vocab=128256),  # Llama 3.2 1B
    "tiny": Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64),  # shows that it works
}
PUNICA_TOKENS_S = 1044.0  # 7B, A100, every popularity; prompt and output tokens (arXiv 2310.18547, section 7.2)
# us on an A100, 4096 -> 4096, rank 16, wall clock round a sync (section 7.1): by popularity and rows
PUNICA_OPERATOR_US = {
    (IDENTICAL, 1): 37.0, (DISTINCT, 64): 116.0, (UNIFORM, 64): 46.0, (SKEWED, 64): 46.0, (IDENTICAL, 64): 40.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` of one popularity; adapter i has rank `ranks[i % len(ranks)]`."""

    rows: int
    popularity: str
    ranks: tuple[int, ...] = (RANK,)

    @property
    def adapters(self) -> list[int | None]:
        """The adapter of each row; rows of one adapter stand beside each other, as the engine orders them."""
        return sorted(
            adapter_of_row(self.popularity, self.rows), key=lambda adapter: -1 if adapter is None else adapter
        )

    @property
    def n_adapters(self) -> int:
        return distinct(self.adapters)

    @property
    def rank_name(self) -> str:
        return f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {min(self.ranks)}-{max(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Operator:
    """Projections that read the same input [n_in], as one LoRA operator."""

    name: str
    n_in: int
    widths: tuple[int, ...]
    most_rows: int = 64

    def batches(self, rank: int) -> list[Batch]:
        """Return batches of powers of two with every popularity, of one rank."""
        sizes = [2**i for i in range(self.most_rows.bit_length())]
        return [Batch(rows, kind, (rank,)) for rows in sizes for kind in (POPULARITIES if rows > 1 else (IDENTICAL,))]

    def adapters_work(self, batch: Batch) -> Work:
        """Return the work of each adapter of the batch read once, and of shrink and expand of each row."""
        width = len(self.widths) * self.n_in + sum(self.widths)
        ranks, row_ranks = ranks_of(batch.adapters, batch.ranks)
        return Work(BF16_BYTES * sum(ranks) * width, 2 * sum(row_ranks) * width)

    def rows_bytes(self, batch: Batch) -> int:
        """Return the bytes of inputs, read once, and of outputs, read and written."""
        return BF16_BYTES * batch.rows * (self.n_in + 2 * sum(self.widths))

    def case(self, batch: Batch) -> str:
        return f"LoRA {self.name}, {batch.rank_name}, batch {batch.rows}, {batch.popularity}"


SQUARE = Operator("4096 -> 4096", 4096, (4096,))
STACKED = Operator("q, k, v 4096 -> 6144", 4096, (4096, 1024, 1024), most_rows=256)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured, of which model; `text_model` is that of text generation. `TINY` shows that it works."""

    model: str = "8B"
    text_model: str = "7B"  # Punica's
    operators: tuple[tuple[Operator, Batch], ...] = (
        (SQUARE, Batch(1, IDENTICAL)),
        *((SQUARE, Batch(64, popularity)) for popularity in POPULARITIES),
        (STACKED, Batch(256, DISTINCT)),
    )
    decode: tuple[tuple[int, int], ...] = ((32, 512), (256, 512), (1, 512), (64, 512), (32, 2048))  # rows, context
    exact_tokens: tuple[int, int] = (96, 24)  # of a prompt, of decode steps after it
    attention: tuple[tuple[int, int, int], ...] = (  # rows, context, query heads of a kv head
        *((32, 2048, group) for group in (1, 4, 8)),
        (1, 8192, 4),
    )
    heads: tuple[int, int] = (32, 128)  # query heads of attention alone, and their size
    prompts: tuple[int, ...] = (2048, 64, 512)
    clocked: int = 9  # runs of a step by the clock
    beside: int = 31  # decode rows beside a prompt, of as many tokens as a decode step's least context
    stream_counts: tuple[int, ...] = (256, 128, 64, 16, 1)  # the second: half load
    stream_adapters: tuple[int, ...] = (0, 64, 384)  # 0: the base
    stream_tokens: tuple[int, int] = (128, 128)  # of a prompt, of an answer
    mixed_counts: tuple[int, ...] = (256, 64)  # streams whose answers have mixed lengths
    stream_spread: int = 96  # tokens by which answers of mixed lengths differ from that at most
    stream_rounds: int = 3  # requests of each stream
    stack_model: str = "1B"
    stack_adapters: int = 8
    offload_bytes: int = 16 << 30  # of the device, for everything; 0: for half of the weights
    offload_rows: tuple[int, ...] = (64, 1)
    offload_context: int = 512
    slots: int = 8
    streams: int = 16  # requests at a time, over so few slots
    crowds: tuple[int, ...] = (16, 64, 256)
    crowd_requests: int = 384
    crowd_tokens: tuple[int, int] = (64, 32)  # of a prompt, of an answer
    folders: int = 4  # adapters on disk that stand for many: each is read, packed and copied anew
    texts: int = 96  # Punica has 1,000
    text_tokens: int = 2048  # of the longest text
    text_rows: int = 32
    peer_rows: int = 32
    peer_tokens: tuple[int, int] = (64, 16)
    peer_rounds: int = 2

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def text_shape(self) -> Shape:
        return SHAPES[self.text_model]

    # Names of cases, as lines and the page have them.

    def decode_name(self, batch: Batch, context: int) -> str:
        return f"{self.model} decode, batch {batch.rows}, context {context}, {batch.popularity}"

    def prompt_name(self, prompt: int, beside: int) -> str:
        rows = f" and {beside} rows" if beside else ""
        return f"{self.model} step of {prompt} prompt tokens{rows}"

    def streams_name(self, streams: int, adapters: int) -> str:
        return f"{self.model}, {streams} streams, {f'{adapters} adapters' if adapters else BASE}"

    def mixed_name(self, streams: int, adapters: int) -> str:
        mean, spread = self.stream_tokens[1], self.stream_spread
        return f"{self.streams_name(streams, adapters)}, answers of {mean - spread} to {mean + spread} tokens"

    def stack_name(self, streams: int, adapters: int) -> str:
        return f"{self.stack_model} over HTTP, {streams} streams, {f'{adapters} adapters' if adapters else BASE}"

    def offload_name(self) -> str:
        return f"{self.model}, {self.offload_bytes >> 30} GiB of the device"

    def crowd_name(self, crowd: int) -> str:
        return f"{self.model}, {crowd} adapters over {self.slots} slots, popularity 1/i"

    def text_name(self, popularity: str) -> str:
        return f"{self.text_model}, text generation, {self.texts} requests, {popularity}"

    def peer_name(self, popularity: str) -> str:
        return f"{self.model}, {self.peer_rows} rows beside transformers + PEFT (baseline), {popularity}"


TINY = Amounts(
    model="tiny", text_model="tiny",
    operators=((Operator("q, k, v 64 -> 80", 64, (48, 16, 16), 3), Batch(3, DISTINCT)),),
    decode=((2, 20), (1, 20)), exact_tokens=(10, 3), attention=((2, 40, 1), (2, 40, 4)), heads=(4, 16), prompts=(20,),
    clocked=1, beside=1, stream_counts=(2, 1), mixed_counts=(2,), stream_adapters=(0, 3), stream_tokens=(4, 3),
    stream_spread=1, stream_rounds=1, stack_model="tiny", stack_adapters=2, slots=2, streams=2,
    offload_bytes=0, offload_rows=(2,), offload_context=20,
    crowds=(3,), crowd_requests=6, crowd_tokens=(4, 2), folders=2, texts=2, text_tokens=6, text_rows=2, peer_rows=2,
    peer_tokens=(4, 2), peer_rounds=1,
)  # fmt: skip


def punica_us(operator: Operator, batch: Batch) -> float | None:
    """Return what Punica published for this very case."""
    published = operator == SQUARE and batch.ranks == (RANK,)
    return PUNICA_OPERATOR_US.get((batch.popularity, batch.rows)) if published else None

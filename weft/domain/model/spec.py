"""What an executor computes of a base model: sizes and factors of its family's arithmetic, layer by layer."""

from dataclasses import dataclass

from weft.domain.model.families import BARE, Family, family_of


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one base theta, of the first `share` of each head; cos and sin are times `attention_factor`.

    `factor`: for linear, llama3 and yarn; the next three for llama3, of which the last also for yarn and longrope; the
    betas and `truncate` for yarn; factors by frequency for longrope, whose `long` ones hold for texts that grow longer
    than `original_max_positions`. Queries at position p are times 1 + g ln(1 + floor(p / `original_max_positions`)),
    g = `query_growth` (Llama 4's scaling by temperature).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    share: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    query_growth: float = 0.0

    def rotated_size(self, head_dim: int) -> int:
        """Count a head's numbers that are rotated: its first ones."""
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. `window`: the tokens that a token attends to, itself included; 0: all.

    `rope`: the number of its rotation among the model's; None: it rotates nothing (NoPE: Kazemnejad et al., NeurIPS
    2023).
    """

    window: int = 0
    rope: int | None = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only model: hidden H, `heads` x `head_dim` queries, N = `kv_heads`, vocabulary V.

    `biases`: the projections that have one. `activation`: silu, or gelu (its tanh form).
    `embedding_scale`: of embeddings; `residual_scale`: of what attention and MLP add to the residual stream;
    `attention_scale`: of scores, before their softmax; None: D ** -0.5. Logits are divided by `logit_divisor`.
    `score_cap`, `logit_cap`: c where scores, or logits, become c tanh(x / c); 0: they stay (Gemma 2, arXiv 2408.00118,
    section 2). `dtype`: the dtype of the stored weights as config.json names it; "" where it names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool  # the head is the embedding; so it is taken to be where there is no head
    ropes: tuple[RopeSpec, ...]
    by_layer: tuple[LayerSpec, ...]
    biases: tuple[str, ...] = ()
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_divisor: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    eos: frozenset[int] = frozenset()
    dtype: str = ""

    @property
    def family(self) -> Family:
        return family_of(self.architecture)

    @property
    def layers(self) -> int:
        """The number of layers, L."""
        return len(self.by_layer)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.by_layer)

    @property
    def short_tokens(self) -> int | None:
        """The length of the longest texts that LongRoPE's short factors are for; None: the model has one set."""
        return next((rope.original_max_positions for rope in self.ropes if rope.long), None)

    @property
    def rotary_size(self) -> int:
        """Numbers of cos and sin for one position: of every rotation, and of its factors for long texts."""
        return sum(rope.rotated_size(self.head_dim) * (2 if rope.long else 1) for rope in self.ropes)

    @property
    def query_growth(self) -> float:
        """How much more queries far behind the original length count; 0: no more."""
        return self.ropes[0].query_growth

    @property
    def growth_tokens(self) -> int:
        """The length in tokens of whose multiples queries grow."""
        return self.ropes[0].original_max_positions

    @property
    def query_scale(self) -> float:
        """Factor of a query's scores before their softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def mlp_size(self) -> int:
        """Outputs of the MLP's first product: gate and up, or up alone."""
        return self.intermediate_size * (2 if self.family.gated else 1)

    def projection(self, name: str) -> tuple[int, int]:
        """(in, out) features of one of the seven projections."""
        hidden, inner = self.hidden_size, self.intermediate_size
        match name:
            case "q_proj":
                return hidden, self.q_size
            case "k_proj" | "v_proj":
                return hidden, self.kv_size
            case "o_proj":
                return self.q_size, hidden
            case "gate_proj" | "up_proj":
                return hidden, inner
            case "down_proj":
                return inner, hidden
            case _:
                raise KeyError(name)


def is_bare(architecture: str) -> bool:
    """Whether such a model has no head: its hidden states are embeddings, and it generates nothing."""
    return architecture.endswith(BARE)

"""The sizes of a random model."""

from collections.abc import Mapping
from dataclasses import dataclass

from weft.domain.model.families import family_of

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model. A head that is tied to the embedding is read as one that is not.

    `head`: numbers of each of the `heads`; 0: they share h evenly. Windows are taken to be longer than contexts.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    architecture: str = "LlamaForCausalLM"
    head: int = 0

    @property
    def head_dim(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def q(self) -> int:
        """Return the width of a token's queries in a layer."""
        return self.head_dim * self.heads

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values, of one token and layer."""
        return self.head_dim * self.kv_heads

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of each linear module, by its name within a layer; some families fuse projections."""
        h, i = self.hidden, self.inner
        of = {
            "q_proj": (h, self.q), "k_proj": (h, self.kv), "v_proj": (h, self.kv), "o_proj": (self.q, h),
            "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h),
        }  # fmt: skip
        held = family_of(self.architecture).modules
        return {name: (of[names[0]][0], sum(of[each][1] for each in names)) for name, names in held.items()}

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices: q, o; k, v; gate, up, down."""
        return sum(n_in * n_out for n_in, n_out in self.modules.values())

    @property
    def weights(self) -> int:
        """Weights that a step multiplies by: all layers and the head."""
        return self.layers * self.layer_weights + self.vocab * self.hidden

    @property
    def lora_width(self) -> int:
        """What one unit of rank costs a layer: the inputs and outputs of all modules; of a Llama 9h + 2kv + 3i."""
        return sum(n_in + n_out for n_in, n_out in self.modules.values())

"""Embeddings: the hidden state of a prompt's last token behind the final norm ("last token" pooling).

A row that pools (`StepRow.pools`) has the hidden state in the first H places of its row of logits, so that the state
takes the way of the logits between stages, ranks and host. What the head computed there is not read. Rows of a step
that pools are as wide as the larger of V and H (`row_width`); the other rows are sampled from their first V places.
"""

from collections.abc import Callable, Sequence

import numpy as np

from weft.domain.model.spec import ModelSpec
from weft_runner.core.sampling import SampledToken
from weft_runner.model.sampling import Floats, SamplingArgs
from weft_runner.model.step import StepInput


def row_width(step: StepInput, spec: ModelSpec) -> int:
    """Return the numbers in a row of a step's logits."""
    return max(spec.vocab_size, spec.hidden_size) if step.pooled else spec.vocab_size


def with_states(logits: Floats, rows: Floats, step: StepInput, norm: Floats, eps: float) -> Floats:
    """Logits [S, V], with the normed rows [S, H] (fp32) of hidden states in those that pool.

    `norm`: RMSNorm's weights [H], or LayerNorm's and what it adds [2, H].
    """
    if not step.pooled:
        return logits
    if (more := rows.shape[1] - logits.shape[1]) > 0:
        logits = np.pad(logits, ((0, 0), (0, more)))
    for place in step.pooled:
        x = rows[place]
        x = x - np.mean(x, dtype=np.float32) if norm.ndim == 2 else x
        scale = np.float32(1.0) / np.sqrt(np.mean(np.square(x), dtype=np.float32) + np.float32(eps))
        logits[place, : len(x)] = x * scale * norm[0] + norm[1] if norm.ndim == 2 else x * scale * norm
    return logits


def with_hidden(
    found: list[SampledToken | None], draws: Sequence[SamplingArgs], row_of: Callable[[int], Floats]
) -> list[SampledToken | None]:
    """What rows sampled; those that pool have their hidden state `row_of(row)` [H], None if it is not finite."""
    for row, draw in enumerate(draws):
        if draw.pools:
            state = row_of(row)
            whole = bool(np.isfinite(state).all())
            found[row] = SampledToken(0, hidden=state.astype("<f4").tobytes()) if whole else None
    return found

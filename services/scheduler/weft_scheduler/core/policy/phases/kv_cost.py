"""The choice between moving KV and computing it again: by what takes less of the stream's time."""

from weft.domain.runner import RunnerSpec

FREEZE_S = 0.02  # two messages and the iteration that a freeze waits for


def transfer_is_cheaper(target: RunnerSpec, tokens: int, bytes_per_s: float) -> bool:
    """Return whether `tokens` tokens of KV arrive at a runner before it could compute them, by its prefill rate.

    False if that rate, or the bytes of a page, are not known.
    """
    if not (target.page_bytes and target.prefill_tokens_per_s):
        return False
    n_bytes = -(-tokens // target.page_tokens) * target.page_bytes
    return FREEZE_S + n_bytes / bytes_per_s < tokens / target.prefill_tokens_per_s

"""S3's packing (section 3): decreasing first fit by predicted KV."""

from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import QueuedRequest, QueuePolicy


class DecreasingFirstFit(QueuePolicy):
    """The largest predicted KV that fits comes first: large items pack while bins are empty, small ones fill the gaps.

    A pass starts at the largest request that a runner has tokens for; those before it cannot be placed, and cost
    nothing, however many wait.
    """

    def key(self, request: QueuedRequest, backlog_s: float) -> Key:
        del backlog_s
        return (-request.waiting.tokens, *request.order)

    def first(self, free_tokens: int) -> Key:
        return (-free_tokens,)

"""The memory that a runner's sequences are expected to use together: the account of pooled admission.

A quantile for each sequence keeps a margin for each, as if all answers were long at once. Here a sequence is expected
to hold, n steps from now, the pages of its prompt and of an answer that is n tokens longer, with the probability
that the answer goes on until then. Sequences end independently of each other, so the variances of a sum add up, and one
margin, of the sum's standard deviation, covers all of them; it grows with the root of their number.

A change of one sequence costs O(horizons). Sums are integers, so that what leaves them leaves nothing behind.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft_scheduler.core.policy.length_distribution import LengthDistribution

HORIZONS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # steps ahead; twice as many change nothing
HEAVY = 0.05  # the share of answers of which a prediction says nothing: they follow a tail that has no mean
NO_USE = (0,) * len(HORIZONS)

OVERRUN_RATE = 0.01  # share of requests that may be preempted for want of memory
DEVIATIONS = 2.5  # standard deviations of the sum, before anything was observed
MAX_DEVIATIONS = 8.0
GAIN = 0.1  # deviations that an overrun adds


class ExpectedUse(NamedTuple):
    """Use of one sequence or of several, at each horizon: tokens of pages, and the variance of them."""

    means: Sequence[int] = NO_USE
    variances: Sequence[int] = NO_USE

    def plus(self, use: "ExpectedUse") -> "ExpectedUse":
        return ExpectedUse(*([a + b for a, b in zip(*pair, strict=True)] for pair in zip(self, use, strict=True)))

    def minus(self, use: "ExpectedUse") -> "ExpectedUse":
        return ExpectedUse(*([a - b for a, b in zip(*pair, strict=True)] for pair in zip(self, use, strict=True)))

    def peak_tokens(self, deviations: float) -> int:
        """Return the highest mean with its margin."""
        sums = zip(self.means, self.variances, strict=True)
        return math.ceil(max(mean + deviations * math.sqrt(variance) for mean, variance in sums))


class UseForecast:
    """Forecast of the memory of one request, by its predicted length."""

    __slots__ = ("_lengths", "_limit", "_prompt_tokens", "_typical")

    def __init__(self, prompt_tokens: int, max_tokens: int, quantiles: Sequence[tuple[float, int]]) -> None:
        self._prompt_tokens, self._limit = prompt_tokens, max_tokens
        self._lengths = LengthDistribution(quantiles)
        self._typical = max(1, quantiles[(len(quantiles) - 1) // 2][1])

    def emitted(self, kv_tokens: int) -> int:
        """Return the tokens of the answer, where `kv_tokens` of prompt and answer are in KV."""
        return max(0, kv_tokens - self._prompt_tokens)

    def use(self, emitted: int, page_tokens: int = 1, shared_pages: int = 0) -> ExpectedUse:
        """Return the use from now on, after `emitted` tokens. `shared_pages`: pages that count for another sequence."""
        emitted = min(emitted, self._limit - 1)
        now, means, variances = self._survival(emitted), [*NO_USE], [*NO_USE]
        for index, steps in enumerate(HORIZONS):
            survives = self._survival(emitted + steps) / now
            if not survives:
                break
            pages = -(-(self._prompt_tokens + emitted + steps + 1) // page_tokens) - shared_pages
            tokens = max(0, pages) * page_tokens
            means[index] = round(survives * tokens)
            variances[index] = round(survives * (1 - survives) * tokens * tokens)
        return ExpectedUse(means, variances)

    def _survival(self, tokens: int) -> float:
        """Return the probability of more than `tokens` tokens.

        An answer that outlives its prediction is one of the heavy ones: it is expected to go on for as long again, and
        a prediction that is far off keeps a variance.
        """
        if tokens >= self._limit:
            return 0.0
        return (1 - HEAVY) * self._lengths.survival(tokens) + HEAVY * self._typical / (self._typical + tokens)


class Margin:
    """Standard deviations of the sum to keep free, so that `OVERRUN_RATE` of a pool's requests overrun.

    An overrun raises it, a request that ends lowers it, in the proportion that balances at that rate (adaptive
    conformal inference: Gibbs and Candes, NeurIPS 2021). So the rate holds whatever the predictions are worth, and
    answers that are correlated, which the sum takes for independent, cost memory instead of preemptions.
    """

    __slots__ = ("deviations",)

    def __init__(self) -> None:
        self.deviations = DEVIATIONS

    def overran(self) -> None:
        """Raise the margin: a request was preempted for the first time."""
        self.deviations = min(MAX_DEVIATIONS, self.deviations + GAIN)

    def ended(self) -> None:
        """Lower the margin: a request is over, preempted or not."""
        self.deviations = max(0.0, self.deviations - GAIN * OVERRUN_RATE)


class Member:
    """One sequence in a runner's account. `held_pages`: its pages by the runner's report or its Assign."""

    __slots__ = ("due_tokens", "emitted", "forecast", "held_pages", "shared_pages", "use")

    def __init__(self, forecast: UseForecast, emitted: int, held_pages: int) -> None:
        self.forecast, self.emitted, self.held_pages = forecast, emitted, held_pages
        self.shared_pages = self.due_tokens = 0
        self.use = ExpectedUse()

    def forecast_use(self, page_tokens: int) -> ExpectedUse:
        return self.forecast.use(self.emitted, page_tokens, self.shared_pages)


class PooledUse:
    """The forecast sequences of one runner, and their sum. `peak_tokens`: as of the last `settle`."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.members: dict[str, Member] = {}
        self.held_pages = 0
        self.sum = ExpectedUse()
        self.deviations = DEVIATIONS
        self.peak_tokens = 0
        self._settled = True

    def add(self, request_id: str, forecast: UseForecast, emitted: int, held_pages: int) -> None:
        """Add a sequence, or a new epoch of a present sequence."""
        self.remove(request_id)
        member = self.members[request_id] = Member(forecast, emitted, held_pages)
        self.held_pages += held_pages
        self._renew(member)

    def remove(self, request_id: str) -> None:
        """Remove a finished sequence. Unknown sequences are ignored."""
        member = self.members.pop(request_id, None)
        if member is not None:
            self.held_pages -= member.held_pages
            self.sum, self._settled = self.sum.minus(member.use), False

    def hold(self, request_id: str, pages: int) -> None:
        """Set the reported pages of a sequence. Unknown sequences are ignored."""
        member = self.members.get(request_id)
        if member is not None:
            self.held_pages += pages - member.held_pages
            member.held_pages = pages

    def progress(self, request_id: str, kv_tokens: int) -> None:
        """Take a sequence's tokens in KV. Its forecast is renewed each page or eighth of its answer."""
        member = self.members.get(request_id)
        if member is not None and kv_tokens >= member.due_tokens:
            member.emitted = member.forecast.emitted(kv_tokens)
            member.due_tokens = kv_tokens + max(self._page_tokens, member.emitted // 8)
            member.shared_pages = max(0, -(-kv_tokens // self._page_tokens) - member.held_pages)
            self._renew(member)

    def settle(self, deviations: float) -> None:
        """Take the sum's peak, with this margin."""
        if not self._settled or deviations != self.deviations:
            self.deviations, self._settled = deviations, True
            self.peak_tokens = self.sum.peak_tokens(deviations)

    def check(self) -> None:
        """Assert that the sums equal the sums over members, and that the use of each member equals its forecast."""
        total, held_pages = ExpectedUse(), 0
        for request_id, member in self.members.items():
            assert member.use == member.forecast_use(self._page_tokens), request_id
            total, held_pages = total.plus(member.use), held_pages + member.held_pages
        assert list(map(list, self.sum)) == list(map(list, total)), (self.sum, total)
        assert self.held_pages == held_pages, (self.held_pages, held_pages)
        assert not self._settled or self.peak_tokens == self.sum.peak_tokens(self.deviations), self.peak_tokens

    def _renew(self, member: Member) -> None:
        old_use, member.use = member.use, member.forecast_use(self._page_tokens)
        self.sum, self._settled = self.sum.minus(old_use).plus(member.use), False

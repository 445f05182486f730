"""The tokens of a request: of its prompt, of its answer so far, and of the answer that is expected."""

from weft_scheduler.core.policy.length_distribution import LengthDistribution

PROMPT_TOKENS = 8  # of a prompt cost as much as one of the answer (A100, 7B: 0.1 ms beside 0.4 to 1 ms at batch 32)
Quantiles = tuple[tuple[float, int], ...]


class RequestTokens:
    """Counts, in tokens. `quantiles`: of the whole answer, as (level, tokens); empty: nothing is predicted.

    `open_ended`: nobody asked for `max_output`, so no runner is too small for the answer.
    """

    __slots__ = ("_median", "_open_ended", "emitted", "max_output", "prompt", "quantiles", "start_emitted")

    def __init__(
        self,
        prompt: int,
        max_output: int,
        emitted: int = 0,
        start_emitted: int = 0,
        *,
        quantiles: Quantiles = (),
        open_ended: bool = False,
    ) -> None:
        self.prompt, self.max_output, self.emitted = prompt, max_output, emitted
        self.start_emitted = start_emitted  # when the present epoch was assigned
        self.quantiles, self._open_ended = quantiles, open_ended
        self._median = 0

    # ------------------------------------------------------------ questions

    @property
    def prefill(self) -> int:
        """Tokens that are computed before its next one, where nothing of it is in KV."""
        return self.prompt + self.emitted

    @property
    def context(self) -> int:
        """The most it can ever hold."""
        return self.prompt + self.max_output

    @property
    def median_output(self) -> int:
        """Tokens of its whole answer: the p50, or half of its first reservation."""
        return min(self._median, self.max_output)

    @property
    def expected_work(self) -> float:
        """What it is expected to cost yet, in output tokens."""
        return self.expected_remaining(self.emitted) + self.prefill / PROMPT_TOKENS

    @property
    def predicted_cost(self) -> float:
        """What the whole request is expected to cost, in output tokens."""
        return self.cost_of(max(self.emitted, self.median_output))

    def cost_of(self, output: int) -> float:
        """Return what it costs with an answer of so many tokens, in output tokens."""
        return self.prompt / PROMPT_TOKENS + output

    def emitted_with(self, in_kv: int) -> int:
        """Return the tokens that are emitted for sure, where its runner has reported so many tokens in KV."""
        return max(self.emitted, in_kv - self.prompt)

    def expected_remaining(self, emitted: int) -> float:
        """Return the tokens of the answer still to come after so many."""
        return LengthDistribution(self.quantiles).expected_remaining(emitted, self.max_output)

    # ------------------------------------------------------------ what is learned

    def predict(self, reserved_until: int) -> None:
        """Expect what is reserved, where nothing was predicted: half of it as the median, all of it as the p90."""
        half = reserved_until // 2
        self.quantiles = self.quantiles or ((0.5, half), (0.9, reserved_until))
        self._median = next((tokens for level, tokens in self.quantiles if level == 0.5), half)

    def fit(self, context: int) -> None:
        """Shorten an answer whose length nobody asked for to what such a context holds, which ends it at the runner."""
        if self._open_ended and context > self.prefill:
            self.max_output = min(self.max_output, context - self.prompt)

    def emit(self, tokens: int) -> None:
        """Note that so many tokens of the answer were streamed."""
        self.emitted = max(self.emitted, tokens)

    def begin_epoch(self) -> None:
        """Note that an epoch goes on from the tokens so far."""
        self.start_emitted = self.emitted

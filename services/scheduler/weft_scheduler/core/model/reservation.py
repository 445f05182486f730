"""What a request reserves of a runner's memory, and how often it has lost it."""

from weft_scheduler.core.model.request_tokens import RequestTokens
from weft_scheduler.core.policy.reservation.policies import remaining_tokens
from weft_scheduler.core.policy.reservation.pooled import UseForecast


class Reservation:
    """The reservation of one request. `reserved_until`: the output position that it reaches to."""

    __slots__ = ("_tokens", "by_page", "forecast", "leaves", "overran", "preemptions", "reserved_until", "stays")

    def __init__(self, tokens: RequestTokens, reserved_until: int = 0, preemptions: int = 0) -> None:
        self._tokens = tokens
        self.reserved_until = reserved_until
        self.by_page = False  # it reserves nothing ahead
        self.leaves = False  # it is the victim of its own overrun
        self.forecast: UseForecast | None = None  # of its memory, where admission is pooled
        self.overran = False  # it was preempted for want of memory
        self.preemptions = preemptions  # on all runners
        self.stays = False  # they are as many as they may be

    # ------------------------------------------------------------ questions

    @property
    def output_tokens(self) -> int:
        """Output tokens to reserve beyond those emitted."""
        return self._after(self._tokens.emitted)

    @property
    def held_tokens(self) -> int:
        """Tokens that its pages have to hold on a runner: prompt, emitted, reservation."""
        return self._tokens.prefill + self.output_tokens

    @property
    def footprint_tokens(self) -> int:
        """Tokens that a runner needs free for it: what is reserved, or the most that it is expected to use."""
        return self.footprint_after(self._tokens.emitted)

    def footprint_after(self, emitted: int) -> int:
        """Return the footprint once so many tokens are emitted."""
        reserved = self._tokens.prompt + emitted + self._after(emitted)
        return reserved if self.forecast is None else max(reserved, self.forecast.use(emitted).peak_tokens(0.0))

    def _after(self, emitted: int) -> int:
        return 1 if self.by_page else remaining_tokens(self.reserved_until, emitted, self._tokens.max_output)

    # ------------------------------------------------------------ what is learned

    def begin(self, tokens: int, *, by_page: bool, leaves: bool, pooled: bool) -> None:
        """Reserve output tokens for the first time; a reservation from before stays."""
        self.reserved_until, self.by_page, self.leaves = self.reserved_until or tokens, by_page, leaves
        of = self._tokens
        of.predict(self.reserved_until)
        self.forecast = UseForecast(of.prompt, of.max_output, of.quantiles) if pooled else None

    def reserve_again(self, tokens: int) -> None:
        """Reserve what the supervisor says for the next epoch, counted from the start of this one."""
        self.reserved_until = max(1, self._tokens.start_emitted + tokens)

    def grow(self, tokens: int) -> None:
        """Note what its runner reports from the start of this epoch on: it may have doubled it in place."""
        self.reserved_until = max(self.reserved_until, self._tokens.start_emitted + tokens)

    def lose_memory(self) -> bool:
        """Note that its memory is another's. True where that is the first time."""
        first, self.overran = not self.overran, True
        return first

    def preempt(self, max_preemptions: int) -> None:
        """Count one more of its bounded preemptions."""
        self.preemptions += 1
        self.limit_preemptions(max_preemptions)

    def limit_preemptions(self, max_preemptions: int) -> None:
        """Reserve the whole answer once it was preempted so often, and let it be no victim from its next epoch on.

        Either alone bounds nothing: a victim is the latest arrival, whether it has overrun or not, and one that is
        spared but grows could wait for pages for ever. With both it runs to its end wherever it is placed, and it can
        be placed: none is accepted that no runner could hold to its limit. A rejection would waste what was computed
        for it so often.
        """
        if self.preemptions >= max_preemptions:
            self.stays, self.reserved_until = True, self._tokens.max_output
            self.by_page, self.leaves, self.forecast = False, False, None

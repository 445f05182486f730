"""How long a step takes, and how many prompt tokens fit into one beside the rows that run. Pure.

Linear in what a step does, as its cost is: weights stream once, keys once a row, prompt tokens are computed.

    step_ms = decode x (base + row * rows + key * keys) + prompt x (token * prompt_tokens)
              + decode x guesses_ms + host * rows + more * guesses

`rows` are decode rows and `keys` the tokens in KV that they attend to. base, row, key and token come from the profile
at start (`StepModel`); the factors follow the measured steps (normalised least mean squares), so that a noisy
neighbour, adapters, or long contexts in prefill, which the form leaves out, change the next chunk and not the promise.
What drafted tokens add is no line: a few tokens read the weights once, a kernel takes some at a time, and more of them
are computed. But it is a matter of the tokens of a step alone, whichever rows they are of (m135: 8 tokens take 12.3 ms
as one row and as four, 30 tokens 31 to 33 ms). So it is a table of steps of one row (`GuessTimes`), with the factor of
decode rows. What steps with guesses take beyond it, on the host for each row and of samplers for each guess, follows
the measured ones in the same way.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

MIN_CHUNK = 32  # tokens: a prompt moves on, whatever the target; fewer stream the weights again for hardly less work
TILE = 16  # chunks are whole tiles of rows: a kernel's last tile costs the same full or not
RATE = 0.125  # of the error, per step: a third of it is left after eight steps
STEP_MOST = 2.0  # one step says at most that steps take twice, or half, as long: an outlier moves a factor by 1/8

GUESS_UNIT = 8  # guesses that weigh as much as the host's part of a row
KEEP = 1.0 - RATE / 256  # of what is known of guesses, a step without any
LATE_STEPS = 160  # that `Lateness` is of: a disturbance is forgotten within seconds


GuessTimes = tuple[tuple[int, float], ...]  # tokens of a step, 1 and more, all but the first guesses; its ms


@dataclass(frozen=True, slots=True)
class StepModel:
    """Milliseconds: of any step, of a decode row, of a key that it attends to, of a prompt token. None is negative."""

    base_ms: float
    row_ms: float
    key_ms: float
    token_ms: float
    guess_times: GuessTimes = ()

    def guesses_ms(self, rows: int, guesses: int) -> float:
        """Return what `guesses` drafted tokens add to a step of `rows` decode rows; unmeasured: each costs a row."""
        if len(self.guess_times) < 2 or not rows:
            return self.row_ms * guesses
        return self._tokens_ms(rows + guesses) - self._tokens_ms(rows)

    def _tokens_ms(self, tokens: int) -> float:
        """Interpolate between two measured numbers of tokens; beyond the last one each costs at least a prompt's."""
        times = self.guess_times
        for (low, low_ms), (high, high_ms) in pairwise(times):
            if tokens <= high:
                return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
        (low, low_ms), (high, high_ms) = times[-2:]
        return high_ms + (tokens - high) * max((high_ms - low_ms) / (high - low), self.token_ms)

    def decode_ms(self, rows: int, keys: int) -> float:
        """A step without prompts."""
        return self.base_ms + self.row_ms * rows + self.key_ms * keys


GUESS = StepModel(base_ms=1.0, row_ms=0.05, key_ms=0.0, token_ms=0.1)  # unprofiled: learnt in some twenty steps


class StepTimeEstimator:
    """The model, its two factors, and the additional time of steps with guesses."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.decode = self.prompt = 1.0
        self._host_ms = self._more_ms = 0.0  # of each row of a step with guesses, and of each guess
        self._guesses_ms: dict[int, list[float]] = {}  # of the model, by rows and guesses

    def step_ms(self, rows: int, keys: int, prompt_tokens: int) -> float:
        """Return how long such a step is expected to take."""
        return self.decode * self.model.decode_ms(rows, keys) + self.prompt * self.model.token_ms * prompt_tokens

    def guesses_ms(self, rows: int, guesses: int) -> float:
        """Return how much longer `guesses` drafted tokens are expected to make a step of `rows` decode rows."""
        by_number = self._guesses_ms.setdefault(rows, [])
        while len(by_number) <= guesses:
            by_number.append(self.model.guesses_ms(rows, len(by_number)))
        return self.decode * by_number[guesses] + self._host_ms * rows + self._more_ms * guesses

    def prefill_ms(self, tokens: int) -> float:
        """Return how long `tokens` tokens of prompts are expected to take."""
        return self.prompt * self.model.token_ms * tokens

    def learn(self, rows: int, keys: int, prompt_tokens: int, measured_ms: float, guesses: int = 0) -> float:
        """A step took so long; what it was expected to. What a mixed step took beyond its decode rows is its prompt's.

        Where it has no prompt, that is its drafted tokens'.

        One that took less than its decode rows alone should proves that these were thought too slow. Without that a
        burst while no prompt ran could hold every later chunk at its least for as long as prompts come without a gap.
        """
        decode_ms = self.decode * self.model.decode_ms(rows, keys)
        prompt_ms = self.prompt * self.model.token_ms * prompt_tokens
        guesses_ms = self.guesses_ms(rows, guesses) if guesses else 0.0
        if not guesses:  # what a few slow steps taught is forgotten
            self._host_ms *= KEEP
            self._more_ms *= KEEP
        if measured_ms < decode_ms or not (prompt_tokens or guesses):
            self.decode *= _correction(measured_ms, decode_ms)
        elif prompt_tokens:
            self.prompt *= _correction(measured_ms - decode_ms - guesses_ms, prompt_ms)
        else:
            late_ms = min(measured_ms, STEP_MOST * (decode_ms + guesses_ms)) - decode_ms - guesses_ms
            weight = guesses / GUESS_UNIT
            part_ms = RATE * late_ms / (rows * rows + weight * weight)
            self._host_ms = max(0.0, self._host_ms + part_ms * rows)
            self._more_ms = max(0.0, self._more_ms + part_ms * weight / GUESS_UNIT)
        return decode_ms + prompt_ms + guesses_ms

    def tokens_within(self, target_ms: float, rows: int, keys: int, prompt_tokens: int, max_tokens: int) -> int:
        """Return the prompt tokens within the time of the step: whole tiles, or a remainder below one tile."""
        left_ms = target_ms - self.step_ms(rows, keys, prompt_tokens)
        fit = min(max_tokens, int(max(0.0, left_ms) / (self.prompt * self.model.token_ms)))
        return fit // TILE * TILE or fit

    def prompt_tokens(self, rows: int, keys: int, target_ms: float, max_tokens: int) -> int:
        """Return the prompt tokens of the next step within `target_ms`: at least MIN_CHUNK, at most `max_tokens`.

        Without running rows no sequence waits for a token, and the chunk is as large as it may be.
        """
        left_ms = target_ms - self.decode * self.model.decode_ms(rows, keys)
        token_ms = self.prompt * self.model.token_ms
        if not rows or left_ms >= token_ms * max_tokens:
            return max_tokens
        fit = int(left_ms / token_ms) if left_ms > 0.0 else 0
        return min(max(fit // TILE * TILE, MIN_CHUNK), max_tokens)


class Lateness:
    """Excess of the last steps' times over the expected times.

    A sum and no factor: what else runs on the machine takes its time from a step of one row as from one of many.
    """

    def __init__(self) -> None:
        self._last = deque[tuple[float, float]](maxlen=LATE_STEPS)
        self.add = self._last.append  # expected and measured ms of a step; one call, for each step makes it

    def ms(self, target_ms: float) -> float:
        """Return the largest excess of the steps that were expected within `target_ms`."""
        late = (measured_ms - expected_ms for expected_ms, measured_ms in self._last if expected_ms <= target_ms)
        return max(0.0, max(late, default=0.0))


def _correction(measured_ms: float, expected_ms: float) -> float:
    """Return the factor's correction: a part of the relative error, bounded for a single step."""
    if expected_ms <= 0.0:
        return 1.0
    ratio = min(max(measured_ms / expected_ms, 1.0 / STEP_MOST), STEP_MOST)
    return 1.0 + RATE * (ratio - 1.0)

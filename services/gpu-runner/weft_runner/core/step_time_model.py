"""How long a step takes, and how many prompt tokens fit into one beside the rows that run. Pure.

Linear in what a step does, as its cost is: weights stream once, keys once a row, prompt tokens are computed.

    step_ms = decode x (base + row * rows + key * keys) + prompt x (token * prompt_tokens)

`rows` are decode rows and `keys` the tokens in KV that they attend to. base, row, key and token come from the profile
at start (`StepModel`); the two factors follow the measured steps (normalised least mean squares), so that a noisy
neighbour, adapters, or long contexts in prefill, which the form leaves out, change the next chunk and not the promise.
"""

from collections import deque
from dataclasses import dataclass

MIN_CHUNK = 32  # tokens: a prompt moves on, whatever the target; fewer stream the weights again for hardly less work
TILE = 16  # chunks are whole tiles of rows: a kernel's last tile costs the same full or not
RATE = 0.125  # of the error, per step: a third of it is left after eight steps
STEP_MOST = 2.0  # one step says at most that steps take twice, or half, as long: an outlier moves a factor by 1/8

LATE_STEPS = 160  # that `Lateness` is of: a disturbance is forgotten within seconds


@dataclass(frozen=True, slots=True)
class StepModel:
    """Milliseconds: of any step, of a decode row, of a key that it attends to, of a prompt token. None is negative."""

    base_ms: float
    row_ms: float
    key_ms: float
    token_ms: float

    def decode_ms(self, rows: int, keys: int) -> float:
        """A step without prompts."""
        return self.base_ms + self.row_ms * rows + self.key_ms * keys


GUESS = StepModel(base_ms=1.0, row_ms=0.05, key_ms=0.0, token_ms=0.1)  # unprofiled: learnt in some twenty steps


class StepTimeEstimator:
    """The model and its two factors. One owner."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.decode = self.prompt = 1.0

    def step_ms(self, rows: int, keys: int, prompt_tokens: int) -> float:
        """Return how long such a step is expected to take."""
        return self.decode * self.model.decode_ms(rows, keys) + self.prompt * self.model.token_ms * prompt_tokens

    def prefill_ms(self, tokens: int) -> float:
        """Return how long `tokens` tokens of prompts are expected to take."""
        return self.prompt * self.model.token_ms * tokens

    def learn(self, rows: int, keys: int, prompt_tokens: int, measured_ms: float) -> float:
        """A step took so long; what it was expected to. What a mixed step took beyond its decode rows is its prompt's.

        One that took less than its decode rows alone should proves that these were thought too slow. Without that a
        burst while no prompt ran could hold every later chunk at its least for as long as prompts come without a gap.
        """
        decode_ms = self.decode * self.model.decode_ms(rows, keys)
        prompt_ms = self.prompt * self.model.token_ms * prompt_tokens
        if not prompt_tokens or measured_ms < decode_ms:
            self.decode *= _correction(measured_ms, decode_ms)
        else:
            self.prompt *= _correction(measured_ms - decode_ms, prompt_ms)
        return decode_ms + prompt_ms

    def tokens_within(self, target_ms: float, rows: int, keys: int, prompt_tokens: int, most: int) -> int:
        """Prompt tokens beyond those that such a step has time for: whole tiles, or what is less than one."""
        left_ms = target_ms - self.step_ms(rows, keys, prompt_tokens)
        fit = min(most, int(max(0.0, left_ms) / (self.prompt * self.model.token_ms)))
        return fit // TILE * TILE or fit

    def prompt_tokens(self, rows: int, keys: int, target_ms: float, most: int) -> int:
        """Prompt tokens of the next step: all that keep it within `target_ms`, at least MIN_CHUNK, at most `most`.

        Without running rows no sequence waits for a token, and the chunk is as large as it may be.
        """
        left_ms = target_ms - self.decode * self.model.decode_ms(rows, keys)
        token_ms = self.prompt * self.model.token_ms
        if not rows or left_ms >= token_ms * most:
            return most
        fit = int(left_ms / token_ms) if left_ms > 0.0 else 0
        return min(max(fit // TILE * TILE, MIN_CHUNK), most)


class Lateness:
    """Excess of the last steps' times over what was expected. One owner.

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
    """Return what to multiply a factor with: a part of the relative error, which one step cannot make large."""
    if expected_ms <= 0.0:
        return 1.0
    ratio = min(max(measured_ms / expected_ms, 1.0 / STEP_MOST), STEP_MOST)
    return 1.0 + RATE * (ratio - 1.0)

"""The tokens that a call has used, and the form of them in each API."""

from dataclasses import dataclass
from typing import Any

from weft.domain.request import DraftUse


@dataclass(frozen=True, slots=True)
class CallUsage:
    """`prompt_tokens` counts each prompt once, `completion_tokens` all answers, without what follows a stop string.

    `cached_tokens`: of the prompts, read from a prefix cache; of several answers to a prompt the one that read least
    counts, since it has computed the prompt for the others. `reasoning_tokens`: of the answers, between the marks of
    their reasoning. `draft_use`: of what the client predicted; None: nothing.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_use: DraftUse | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def of_choices(self) -> dict[str, Any]:
        """Write the usage of a chat or a completion."""
        details = {"reasoning_tokens": self.reasoning_tokens}
        if self.draft_use is not None:
            details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = self.draft_use
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": details,
        }

    def of_items(self) -> dict[str, Any]:
        """Write the usage of a response or a batch."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.total_tokens,
        }

    def of_message(self) -> dict[str, Any]:
        """Write Anthropic's usage of a message: `input_tokens` leaves out tokens read from the cache."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }

    def of_vectors(self) -> dict[str, int]:
        """Write the usage of embeddings, scores and rankings."""
        return {"prompt_tokens": self.prompt_tokens, "total_tokens": self.total_tokens}

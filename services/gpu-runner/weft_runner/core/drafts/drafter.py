"""What is drafted for the rows of a step: found in texts or given, and as much of it as is expected to pay. Pure.

A draft is what a text goes on with behind the longest match of a sequence's end (SuffixDecoding, arXiv:2411.04975,
section 3.2; prompt lookup): the text is the sequence's own prompt and answer, or its adapter's recent answers. A caller
may give a draft of its own (`CallerDraft`). The step that checks a draft gives the tokens that steps of one token would
have given, so that a draft can only save time.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from weft.domain.request import DraftUse
from weft_runner.core.batch import MAX_LOGIT_ROWS, Batch, Row
from weft_runner.core.drafts.acceptance import SUREST, Acceptance, Draft, weigh_alike
from weft_runner.core.drafts.caller_draft import CallerDraft
from weft_runner.core.drafts.recent_answers import AdapterText, RecentAnswers, text_key
from weft_runner.core.sequence import Sequence as PoolSequence

MAX_STEP_GUESSES = MAX_LOGIT_ROWS  # each has a row of logits
# Of an adapter's text, for all rows: what is read displaces weights from the cache, which a short step reads again.
SCAN_TOKENS_A_MS, MIN_SCAN_TOKENS = 1 << 16, 1 << 12
# Of a step's time, the wait for what a grammar forces; a shorter one, in which two threads take turns, is never enough.
FORCED_SHARE, MIN_FORCED_MS = 0.1, 0.1
SEARCH_MS, MAX_SEARCH_SHARE = 0.04, 0.003  # of one row, about; what searches that find nothing may take of the steps


class DraftQuery(NamedTuple):
    """What a text goes on with behind the longest match of a tail's end, at most `max_tokens` of it.

    `shares`: of an `Acceptance`, to weigh guesses by; `first`: what is before that token of the text is not searched.
    """

    text: "array[int]"
    tail: "array[int]"
    shares: "array[float]"
    max_tokens: int
    first: int = 0


# At every iteration: their own constructors are Python functions.
_query, _row = partial(tuple.__new__, DraftQuery), partial(tuple.__new__, Row)
Search = Callable[[Sequence[DraftQuery]], Sequence[Draft]]


class DraftFigures(NamedTuple):
    """Counts since the start: rows with a draft, their guesses, and right guesses."""

    drafts: int
    guesses: int
    accepted: int


@dataclass(slots=True)
class _Own:
    """The prompt and answer of a sequence as one text, and the text of its adapter."""

    answers: AdapterText
    tokens: "array[int]" = field(default_factory=lambda: array("i"))


class _Proposal(NamedTuple):
    """A draft of a row, and whose acceptance it is weighed by and learnt in."""

    draft: Draft
    acceptance: Acceptance


class Drafter:
    """Drafts for sequences, owned by the batch scheduler. `search` None: only drafts of callers."""

    def __init__(self, search: Search | None) -> None:
        self._search = search
        self.answers = RecentAnswers()
        self._of_sequences: dict[str, _Own] = {}
        self._caller_drafts: dict[str, CallerDraft] = {}
        self._checked: dict[str, _Proposal] = {}  # rows of the present step
        self._drafts = self._guesses = self._accepted = 0
        self._step, self._rests = 0, (0, 0)  # the batch of that number has nothing due before that step

    def rests(self, batch: Batch) -> bool:
        """Count a step; say whether nothing is searched for: its batch has no decode row, or none that is due."""
        self._step += 1
        number, rest_until = self._rests
        idle = self._search is None and not self._caller_drafts
        return idle or (number == batch.number != 0 and self._step < rest_until) or batch.n_prefills == len(batch.rows)

    @property
    def figures(self) -> DraftFigures:
        return DraftFigures(self._drafts, self._guesses, self._accepted)

    def extend(
        self,
        batch: Batch,
        sequences: Mapping[str, PoolSequence],
        max_guesses: Callable[[PoolSequence], int],
        n_worth: Callable[[Sequence[float]], int],
        step_ms: float,
        now: float,
    ) -> Batch:
        """Return a batch with guesses after the tokens of decode rows, or the unchanged batch.

        `max_guesses`: what a sequence's pages and its answer's length leave place for. `n_worth`: how many guesses pay
        of those with these expected tokens, largest first. `step_ms`: what the batch takes as it is.
        """
        # 1. Search for every decode row that has place and is due. What a grammar leaves no choice about is on its way.
        of_rows = [sequences[row.key] for row in batch.rows[batch.n_prefills :]]
        if (forced_ms := FORCED_SHARE * step_ms) >= MIN_FORCED_MS:
            _await_forced(of_rows, forced_ms / 1e3)
        max_scan = max(MIN_SCAN_TOKENS, int(SCAN_TOKENS_A_MS * step_ms / len(of_rows)))
        proposals = self._propose(of_rows, max_guesses, max_scan, now)
        if not proposals:
            if all(sequence.mask is None for sequence in of_rows):
                self._rests = batch.number, min(self._of_sequences[one.key].answers.due for one in of_rows)
            return batch
        # 2. Take as many guesses as pay, the likeliest first: within a row each is at most as likely as the one before.
        ranked = [
            (gain, key) for key, proposal in proposals.items() if proposal is not None for gain in proposal.draft.gains
        ]
        ranked.sort(reverse=True)
        worth = n_worth([gain for gain, _ in ranked[:MAX_STEP_GUESSES]]) if ranked else 0
        counts: dict[str, int] = {}
        for _, key in ranked[:worth]:
            counts[key] = counts.get(key, 0) + 1
        max_pause_steps = int(len(batch.rows) * SEARCH_MS / (MAX_SEARCH_SHARE * step_ms))
        rows, self._checked = list(batch.rows), {}
        for at, (key, adapter, n_tokens, samples, _) in enumerate(batch.rows):
            if key not in proposals:
                continue
            proposal, count, answers = proposals[key], counts.get(key, 0), self._of_sequences[key].answers
            was_useful = count > 0 and proposal is not None and proposal.acceptance is not answers.from_caller
            answers.rest(self._step, was_found=was_useful, max_steps=max_pause_steps)
            if proposal is not None and count:
                rows[at] = _row((key, adapter, n_tokens + count, samples, tuple(proposal.draft.tokens[:count])))
                self._checked[key] = proposal
            elif proposal is not None:  # what is known of its class fades, so that it is tried again some day
                proposal.acceptance.pass_over(proposal.draft)
        if not worth:
            return batch
        self._drafts += len(self._checked)
        self._guesses += worth
        return Batch(tuple(rows), batch.n_prefills, extends=batch.number)

    def admit(self, sequence: PoolSequence) -> None:
        """Follow the draft of a request."""
        if sequence.start.draft:
            self._caller_drafts[sequence.key] = CallerDraft(sequence.start.draft, len(sequence.start.prompt))

    def learn(self, row: Row, sampled: Sequence[int]) -> DraftUse | None:
        """Learn from the samples of a row with a draft: the leading right guesses and one more token.

        Return how the draft of its caller fared; None: it had another one.
        """
        draft, acceptance = self._checked.pop(row.key)
        accepted = len(sampled) - 1
        self._accepted += accepted
        wrong = accepted < len(row.drafted) and sampled[-1] != row.drafted[accepted]  # else its mask was late
        acceptance.learn(draft, accepted, checked=wrong)
        from_caller = acceptance is self._of_sequences[row.key].answers.from_caller
        return DraftUse(accepted, len(row.drafted) - accepted) if from_caller else None

    def remove(self, sequence: PoolSequence, now: float, *, ended: bool) -> None:
        """Forget a sequence; `ended`: its answer is whole, and others may repeat it."""
        self._of_sequences.pop(sequence.key, None)
        self._caller_drafts.pop(sequence.key, None)
        self._checked.pop(sequence.key, None)
        if self._search is not None and ended and sequence.n_emitted:
            self.answers.add(text_key(sequence.start), sequence.tokens[len(sequence.start.prompt) :], now)

    def _propose(
        self, sequences: Sequence[PoolSequence], max_guesses: Callable[[PoolSequence], int], max_scan: int, now: float
    ) -> dict[str, _Proposal | None]:
        """Find the best draft of two texts and its caller's for each sequence that has place; None: there is none.

        Texts are searched for those that are due.
        """
        queries, acceptances = list[DraftQuery](), list[tuple[PoolSequence, Acceptance]]()
        proposals: dict[str, _Proposal | None] = {}
        for sequence in sequences:
            if (state := self._of_sequences.get(sequence.key)) is None:
                state = self._of_sequences[sequence.key] = _Own(self.answers.use(text_key(sequence.start), now))
            forced = () if sequence.mask is None else sequence.mask.forced
            due, caller_draft = (
                self._search is not None and self._step >= state.answers.due,
                self._caller_drafts.get(sequence.key),
            )
            if not forced and not due and caller_draft is None:
                continue
            if (max_guesses_now := min(max_guesses(sequence), MAX_STEP_GUESSES)) <= 0:
                continue
            proposals[sequence.key] = None
            if forced:
                acceptance = state.answers.from_grammar
                draft = weigh_alike(forced[:max_guesses_now], SUREST, acceptance.shares)
                proposals[sequence.key] = _Proposal(_allowed_draft(sequence, draft), acceptance)
                continue
            acceptance = state.answers.from_caller
            if (
                caller_draft is not None
                and (draft := caller_draft.draft(sequence.tokens, max_guesses_now, acceptance.shares)) is not None
            ):
                proposals[sequence.key] = _Proposal(_allowed_draft(sequence, draft), acceptance)
            if not due:
                continue
            state.tokens.extend(sequence.tokens[len(state.tokens) :])
            text, tail = state.answers, state.tokens
            queries.append(_query((tail, tail, text.from_own.shares, max_guesses_now, 0)))
            acceptances.append((sequence, text.from_own))
            if text.tokens:
                first = max(0, len(text.tokens) - max_scan)
                queries.append(_query((text.tokens, tail, text.from_answers.shares, max_guesses_now, first)))
                acceptances.append((sequence, text.from_answers))
        drafts = self._search(queries) if queries and self._search is not None else ()
        for (sequence, acceptance), draft in zip(acceptances, drafts, strict=True):
            if not draft.tokens:
                if draft.classes:
                    acceptance.pass_over(draft)
                continue
            proposal, best = _allowed_draft(sequence, draft), proposals[sequence.key]
            if best is None or sum(proposal.gains) > sum(best.draft.gains):
                proposals[sequence.key] = _Proposal(proposal, acceptance)
        return proposals


def _await_forced(sequences: Sequence[PoolSequence], most_s: float) -> None:
    """Wait at most `most_s` for the tokens forced by grammars after these answers."""
    masks = [sequence.mask.grammar for sequence in sequences if sequence.mask is not None]
    if grammars := [grammar for grammar in masks if grammar is not None]:
        grammars[0].await_forced(grammars, most_s)


def _allowed_draft(sequence: PoolSequence, draft: Draft) -> Draft:
    """Cut a draft before a token that would end the answer."""
    if sequence.end_tokens.isdisjoint(draft.tokens):
        return draft
    end = next(at for at, token in enumerate(draft.tokens) if token in sequence.end_tokens)
    return Draft(draft.tokens[:end], draft.classes, draft.gains[:end])

"""`weft bench phases`: what both modes are given, and how rounds of role changes are counted."""

import random

from weft_bench.fault_streams import Ask, Stream, Token
from weft_bench.lines import Line, Origin
from weft_bench.phases import CHAT_ANSWER, LONG_ANSWER, LONG_SHARE, mixed
from weft_bench.phases_roles import Round, lines

ORIGIN = Origin("weft bench phases", "a machine", "versions")
ASK = Ask("base", "w7", 2, 0.0, 0)
TOKENS = [Token("w8", -1.0), Token("w9", -2.0)]


def test_long_prompts_are_spread_evenly_and_requests_take_turns_over_models() -> None:
    mix = mixed(random.Random(0), ["base", "default/a", "default/b"], 60, long_prompt=200)
    assert sum(mix.long) == LONG_SHARE * 60
    assert all(sum(mix.long[at : at + 10]) == 10 * LONG_SHARE for at in range(0, 60, 10))
    assert [number for number, _ in mix.bodies[:4]] == [-1, 0, 1, -1]
    for (_, body), long in zip(mix.bodies, mix.long, strict=True):
        assert (len(body["prompt"]), body["max_tokens"]) == ((200, LONG_ANSWER) if long else (64, CHAT_ANSWER))


def test_rounds_of_role_changes_show_what_failed_differed_or_came_late() -> None:
    right, short = Stream(ASK, "a", [*TOKENS]), Stream(ASK, "b", TOKENS[:1])
    broken = Stream(ASK, "c", TOKENS[:1], error="503")
    found = [Round([right], 1, 1), Round([short, broken], 2, 6), Round([], 0, 0)]
    by_metric = {line.metric: line for line in lines(ORIGIN, "roles", found, {ASK: TOKENS}, 3)}
    assert by_metric["requests that failed"].value == 1
    assert by_metric["tokens lost, repeated or wrong"].value == 1
    assert by_metric["iterations until that token, mean"].value == 7 / 3
    late: Line = by_metric["iterations until that token, most of a burst"]
    assert (late.value, late.met) == (3, False)

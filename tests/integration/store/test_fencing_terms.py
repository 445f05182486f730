import asyncio

from weft.store import fencing_terms


async def test_a_term_only_grows_and_one_that_none_can_be_above_is_not_taken(engine):
    assert await fencing_terms.highest(engine) == 0
    for told, known in ((2**62, 0), (5, 5), (3, 5), (6, 6)):
        await fencing_terms.raise_to(engine, told)
        assert await fencing_terms.highest(engine) == known


async def test_writers_at_the_same_time_wait_for_each_other(engine):
    await asyncio.gather(*(fencing_terms.raise_to(engine, term) for term in range(1, 20)))
    assert await fencing_terms.highest(engine) == 19

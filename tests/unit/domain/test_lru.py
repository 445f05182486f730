from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.lru import ExpiringDict, LruDict

steps = st.lists(st.tuples(st.sampled_from(["set", "touch", "get", "pop", "setdefault"]), st.integers(0, 9)))


@given(steps, st.integers(1, 5))
def test_the_entries_written_or_touched_latest_stay(steps, limit):
    lru, model = LruDict(limit), OrderedDict()
    for number, (step, key) in enumerate(steps):
        if step == "set":
            lru[key] = model[key] = number
            model.move_to_end(key)
        elif step == "touch":
            assert lru.touch(key, lambda number=number: number) == model.setdefault(key, number)
            model.move_to_end(key)
        elif step == "get":
            assert lru.get(key) == model.get(key)
        elif step == "pop":
            assert lru.pop(key, None) == model.pop(key, None)
        else:
            assert lru.setdefault(key, number) == model.setdefault(key, number)
        while len(model) > limit:
            model.popitem(last=False)
        assert list(lru.items()) == list(model.items())


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0.0, 3.0))), st.integers(1, 5), st.floats(0.0, 5.0)
)
def test_an_entry_is_there_for_its_time_after_it_was_written(steps, limit, keep_s):
    found, model, now = ExpiringDict[int, int](limit, keep_s), LruDict[int, tuple[float, int]](limit), 0.0
    for number, (writes, key, pause_s) in enumerate(steps):
        now += pause_s
        if writes:
            found.put(key, number, now)
            model[key] = now, number
            assert len(found) == sum(now - at < keep_s for at, _ in model.values()), "expired ones take no memory"
        at, value = model.get(key, (-1e9, None))
        assert found.get(key, now) == (value if now - at < keep_s else None)

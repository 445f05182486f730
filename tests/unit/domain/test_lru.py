from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.lru import LruDict

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

"""The order of events, and random streams."""

from weft_sim.clock import Clock, Rank, random_of


def test_simultaneous_events_happen_by_rank_and_then_in_the_order_they_were_scheduled() -> None:
    clock, happened = Clock(0.0), list[str]()
    for name, time, rank in (
        ("law", 1.0, Rank.LAW),
        ("arrival", 1.0, Rank.ARRIVAL),
        ("deadline", 1.0, Rank.DEADLINE),
        ("work", 1.0, Rank.WORK),
        ("second delivery", 1.0, Rank.DELIVERY),
        ("third delivery", 1.0, Rank.DELIVERY),
        ("fault", 1.0, Rank.FAULT),
        ("earlier", 0.5, Rank.LAW),
    ):
        clock.at(time, rank, happened.append, name)
    clock.run()
    assert happened == [
        "earlier", "fault", "second delivery", "third delivery", "work", "deadline", "arrival", "law",
    ]  # fmt: skip
    assert list(Rank) == [Rank.FAULT, Rank.DELIVERY, Rank.WORK, Rank.DEADLINE, Rank.ARRIVAL, Rank.LAW]


def test_an_event_of_the_present_time_happens_before_later_ones_and_never_in_the_past() -> None:
    clock, happened = Clock(0.0), list[tuple[float, str]]()
    clock.at(1.0, Rank.DELIVERY, lambda: clock.at(0.2, Rank.DELIVERY, lambda: happened.append((clock.now, "late"))))
    clock.at(2.0, Rank.DELIVERY, lambda: happened.append((clock.now, "next")))
    clock.run()
    assert happened == [(1.0, "late"), (2.0, "next")]


def test_random_streams_depend_on_seed_and_name_alone() -> None:
    assert random_of(1, "a").random() == random_of(1, "a").random()
    assert len({random_of(seed, name).random() for seed in (1, 2) for name in ("a", "b")}) == 4

"""What imports make is no work of the cyclic collector; the collector works again afterwards."""

import gc

from weft.process import uncollected_imports


def test_the_collector_rests_meanwhile_and_never_visits_what_was_made() -> None:
    before = gc.get_freeze_count()
    with uncollected_imports():
        made = [[number] for number in range(1000)]
        rests = not gc.isenabled()
    assert rests
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)

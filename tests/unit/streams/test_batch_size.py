"""How many records the next batch asks for: what the time allows, and what the brokers committed."""

from onepen.streams.batch_size import BatchSize, Limits


def test_it_begins_at_the_limit_and_never_leaves_its_bounds() -> None:
    size = BatchSize(Limits(records=10))
    assert size.records == 10
    size.was_committed(10)
    assert size.records == 10
    for _ in range(6):
        size.was_refused()
    assert size.records == 1


def test_what_was_cut_asks_for_a_little_more_and_grows_while_the_time_allows() -> None:
    size = BatchSize(Limits(records=100))
    size.was_cut(9)
    assert size.records == 18
    size.was_committed(9)
    assert size.records == 18
    size.was_committed(18)
    assert size.records == 36
    size.was_refused()
    assert size.records == 18
    size.was_committed(3)
    assert size.records == 18, "a small batch says nothing about large ones"

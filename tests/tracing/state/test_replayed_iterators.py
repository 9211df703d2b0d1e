"""Iterators give again what a run that is not the user's own took, and stay as they are where it took nothing."""

from __future__ import annotations

from itertools import count, cycle, islice
from types import SimpleNamespace

from pipecompile.tracing.state.replayed_iterators import ReplayedIterator, iterators_replayed
from pipecompile.tracing.state.snapshot import places_of

STEPS = count()


def squares():
    for i in count():
        got = yield i * i
        assert got is None


def test_what_was_taken_is_given_again():
    holder = SimpleNamespace(count=count(5), items=[iter("abc")], squares=squares(), quiet=(quiet := cycle("xy")))
    for _ in range(2):
        with iterators_replayed(places_of(holder, deep=True), []) as advanced:
            assert [next(holder.count), next(holder.count), next(holder.items[0])] == [5, 6, "a"]
            assert list(islice(holder.squares, 3)) == [0, 1, 4]
        assert len(advanced) == 3
    assert list(islice(holder.count, 4)) == [5, 6, 7, 8]
    assert "".join(holder.items[0]) == "abc"
    assert list(islice(holder.squares, 5)) == [0, 1, 4, 9, 16]
    assert holder.quiet is quiet
    holder.squares.close()
    assert list(holder.squares) == []


def test_globals_and_blocks_within_blocks():
    steps = STEPS
    with iterators_replayed([], [(globals(), ["STEPS", "squares", "missing"])]) as outer:
        assert next(STEPS) == 0
        with iterators_replayed([], [(globals(), ["STEPS"])]) as inner:
            assert [next(STEPS), next(STEPS)] == [1, 2]
        assert next(STEPS) == 1
        with iterators_replayed([], [(globals(), ["STEPS"])]) as untouched:
            assert "count(3)" in repr(STEPS)
        assert next(STEPS) == 2
    assert (len(outer), len(inner), untouched) == (1, 1, [])
    assert isinstance(STEPS, ReplayedIterator)
    assert [next(STEPS) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert repr(STEPS) == "count(5)"
    assert next(steps) == 5  # nothing is kept of what was given


def test_the_end_of_an_iterator_is_given_again():
    holder = [iter([1])]
    with iterators_replayed(places_of(holder), []):
        assert list(holder[0]) == [1]
    assert list(holder[0]) == [1]
    assert list(holder[0]) == []

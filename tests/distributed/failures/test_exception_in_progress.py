"""What another thread sees of the exceptions that the main thread handles."""

from __future__ import annotations

from pipecompile.distributed.failures.exception_in_progress import LongHandling


def test_an_exception_is_told_at_the_second_look_and_its_end_once() -> None:
    handling = LongHandling()
    assert handling.news() is None
    try:
        raise ValueError("bad record 7")
    except ValueError:
        said = [handling.news() for _ in range(3)]
    assert said == [None, "ValueError: bad record 7", None]
    assert [handling.news() for _ in range(2)] == ["", None]


def test_an_exception_that_is_caught_at_once_is_not_told() -> None:
    handling = LongHandling()
    try:
        raise ValueError("bad record 7")
    except ValueError:
        assert handling.news() is None
    assert handling.news() is None


def test_another_exception_ends_the_first() -> None:
    handling = LongHandling()
    try:
        raise ValueError("bad record 7")
    except ValueError as first:
        assert [handling.news() for _ in range(2)] == [None, "ValueError: bad record 7"]
        try:
            raise KeyError(1) from first
        except KeyError:
            assert [handling.news() for _ in range(2)] == ["", "KeyError: 1"]

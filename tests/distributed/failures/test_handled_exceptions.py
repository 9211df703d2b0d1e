from __future__ import annotations

from pipecompile.distributed.failures.failure_report import FailureReport
from pipecompile.distributed.failures.handled_exceptions import LongHandling, with_handled
from pipecompile.errors import InputError


def raised(body: str) -> BaseException:
    """Return the exception of statements, as a script of the user's raises it."""
    try:
        exec(compile(body, "train.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        return error
    raise AssertionError


BARRIER = """
try:
    raise ValueError("bad record")
finally:
    raise RuntimeError("timed out")
"""


def test_what_a_script_was_handling_is_named() -> None:
    """Other ranks were told of a barrier that timed out, and not of the record."""
    text = "RuntimeError: timed out, while ValueError: bad record was being handled"
    assert with_handled(raised(BARRIER)) == text
    assert FailureReport.of(raised(BARRIER), 1).what == text


def test_the_first_of_several_is_named_behind_causes() -> None:
    body = """
try:
    raise ValueError("bad record")
except ValueError:
    try:
        raise RuntimeError("connection closed")
    except RuntimeError as error:
        raise LookupError("not saved") from error
"""
    assert with_handled(raised(body)) == "LookupError: not saved, while ValueError: bad record was being handled"


def test_an_explanation_and_what_libraries_handle_among_themselves_count_not() -> None:
    explained = "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no a') from error"
    hidden = explained.replace("error:", "_:").replace("from error", "from None").replace(" as _", "")
    assert with_handled(raised(explained)) == with_handled(raised(hidden)) == "ValueError: no a"
    of_a_library = (
        "import contextlib\nwith contextlib.ExitStack() as stack:\n    stack.callback({}.pop, 'b')\n    {}['a']"
    )
    assert with_handled(raised(of_a_library)) == "KeyError: 'b', while KeyError: 'a' was being handled"
    assert with_handled(raised("import json\njson.loads('{')")).startswith("JSONDecodeError: Expecting")


def test_ctrl_c_stands_alone_and_an_error_of_ours_keeps_its_text() -> None:
    assert (
        with_handled(raised(BARRIER.replace('RuntimeError("timed out")', "KeyboardInterrupt"))) == "KeyboardInterrupt"
    )
    assert with_handled(InputError("not saved", why="no space"), "InputError: not saved") == "InputError: not saved"


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

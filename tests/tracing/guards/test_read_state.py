"""The state of a recording as data: values, rows that fetch them again, and the lines of reads."""

from __future__ import annotations

from pipecompile.tracing.guards.read_state import ABSENT, ReadState, line_of_read

LIMIT = 3


def reader() -> int:
    first = 1
    return LIMIT + first


def test_the_line_of_a_global_is_that_which_loads_it() -> None:
    code = reader.__code__
    assert line_of_read((code, "LIMIT")) == f"{code.co_filename}:{code.co_firstlineno + 2} in reader"
    assert line_of_read("a.py:3 in f") == "a.py:3 in f"


def test_a_name_that_is_not_loaded_has_the_line_of_the_function() -> None:
    code = reader.__code__
    assert line_of_read((code, "absent")) == f"{code.co_filename}:{code.co_firstlineno} in reader"


def test_rows_fetch_the_present_values() -> None:
    state, table = ReadState(), {"a": 1, "b": 2}
    state.add_names(table, ["a"])
    state.add_names(table, [])
    ((fetch, holder, values),) = state.rows
    assert set(values) == {1}
    table["a"] = 5
    assert set(fetch(holder)) == {5}
    assert repr(ABSENT) == "absent"

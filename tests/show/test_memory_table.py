"""The table of memory: one unit for all columns, sums, and the limit."""

from __future__ import annotations

from pipecompile.show.memory_table import memory_columns, memory_remarks

MEBI = 2.0**20
KINDS = {
    "parameters": [4 * MEBI, 2 * MEBI],
    "gradients": [4 * MEBI, 0.0],
    "optimizer": [8 * MEBI, 0.0],
    "activations": [1 * MEBI, 3 * MEBI],
}


def test_every_kind_has_a_column_and_the_sum_of_each_device_follows() -> None:
    columns = memory_columns(("cpu", "cpu"), KINDS)
    assert columns["device"] == (["0 · cpu", "1 · cpu"], "")
    assert columns["optimizer\nMiB"] == (["8.0", "0"], "8.0")
    assert columns["all\nMiB"] == (["17.0", "5.0"], "22.0")
    assert not any("limit" in name for name in columns)


def test_a_limit_has_two_columns() -> None:
    columns = memory_columns(("cpu", "cpu"), KINDS, (34 * MEBI, 4 * MEBI))
    assert columns["limit\nMiB"] == (["34.0", "4.0"], "")
    assert columns["of the limit"] == (["50%", "125%"], "")


def test_the_fullest_device_is_named_with_its_largest_kind() -> None:
    (line,) = memory_remarks(KINDS)
    assert line.startswith("Device 0 holds most, 17.0 MiB, of which 47% state of the optimizer: ")
    lines = memory_remarks(KINDS | {"optimizer": [0.0, 0.0], "activations": [1e9, 0.0]})
    assert "checkpoint='auto'" in lines[0]
    assert lines[1].startswith("No state of an optimizer is counted")
    assert memory_remarks({"parameters": [0.0]}) == []

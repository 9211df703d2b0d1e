"""Blocks around a line: the smallest first, none that leaves the block, and none that is the whole function."""

from __future__ import annotations

import pytest

from pipecompile.tracing.outlining.code_blocks import CodeBlock, blocks_around, find_block, in_loop
from pipecompile.tracing.outlining.function_source import source_of


def walk(x, layers, limit):
    seen = []
    for layer in layers:
        if x > limit:
            continue
        p = x + 1
        if p > x:
            x = layer(x)
        seen.append(p)
    if x > 5:
        return -x
    return x + len(seen)


def stops(x, layers):
    total = 0
    for layer in layers:
        x = layer(x)
        if x > 5:
            break
        total = total + 1
    del layers
    return x, total


def looks(x):
    y = x + 1
    names = locals()
    return y, names


def lines(function, offset):
    code = function.__code__
    found = list(blocks_around(code, code.co_firstlineno + offset))
    return [(one.begin[0] - code.co_firstlineno, one.end[0] - code.co_firstlineno) for one in found]


@pytest.mark.parametrize(
    ("function", "line", "blocks"),
    [
        (walk, 3, [(3, 8), (2, 8), (2, 11)]),  # `continue` leaves all but the iteration
        (walk, 5, [(5, 5), (5, 8), (3, 8), (2, 8), (2, 11)]),
        (walk, 7, [(7, 7), (6, 7), (3, 8), (2, 8), (2, 11)]),
        (walk, 8, [(8, 8), (3, 8), (2, 8), (2, 11)]),
        (walk, 9, [(9, 11)]),  # `return` needs the end of the function
        (stops, 3, [(3, 3), (2, 6)]),
        (stops, 4, [(2, 6)]),  # `break` leaves all but the loop
        (looks, 2, []),
    ],
)
def test_blocks_around_a_line(function, line, blocks) -> None:
    assert lines(function, line) == blocks


def test_what_a_block_reads_and_writes() -> None:
    code = walk.__code__
    first = code.co_firstlineno
    places = {place.begin[0] - first: place for place in blocks_around(code, first + 7)}
    source = source_of(code)
    inner = find_block(source, places[6])
    assert (inner.reads, inner.writes, inner.uncertain) == (("layer", "p", "x"), ("x",), {"x"})
    iteration = find_block(source, places[3])
    assert iteration.is_iteration
    assert iteration.changed == {"seen"}
    assert iteration.writes == ("x",)
    tail = find_block(source, next(blocks_around(code, first + 9)))
    assert tail.has_return
    assert tail.writes == ()


def test_texts_parse_back() -> None:
    block = CodeBlock("/a b/c:d.py", "Model.<locals>.forward", 3, (4, 8), (5, 12))
    assert CodeBlock.parse(str(block)) == block
    assert block.lines == "lines 4 to 5"


def test_lines_in_loops() -> None:
    code = walk.__code__
    assert [in_loop(code, code.co_firstlineno + offset) for offset in (1, 3, 7, 9)] == [False, True, True, False]

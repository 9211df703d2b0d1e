"""Blocks: statements of one function that can be outlined, found around a line, the smallest first.

def forward(self, x):
    for layer in self.layers:
        p = torch.rand(())
        if p > self.drop:            1  the statement of the line
            x = layer(x)             2  up to the last statement that reads what it assigns
        x = self.norm(x)             3  the whole iteration
    return self.head(x)              4  the loop; at last, if a block has a `return`, all up to the end of the function
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from pipecompile.tracing.outlining.function_source import FunctionSource, source_of
from pipecompile.tracing.outlining.name_flow import NameFlow

__all__ = ["Block", "CodeBlock", "blocks_around", "find_block", "in_loop"]

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_STATEMENTS = tuple(kind for kind in ast.stmt.__subclasses__() if kind not in (ast.Expr, ast.Pass))
"""Statements that are more than a docstring or a call of which the result is not used."""

_SCOPE_READERS = frozenset({"locals", "vars", "eval", "exec", "dir", "super", "__class__"})
"""Names whose meaning depends on the function that they are used in."""


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """The place of a block: file, name and first line of its function, and (line, column) where it begins and ends."""

    file: str
    function: str
    first_line: int
    begin: tuple[int, int]
    end: tuple[int, int]

    def __str__(self) -> str:
        (line, column), (last, end) = self.begin, self.end
        return f"{self.file}:{self.first_line} {self.function} {line}:{column}-{last}:{end}"

    @classmethod
    def parse(cls, text: str) -> CodeBlock:
        """Return the block with this text."""
        place, function, ends = text.rsplit(" ", 2)
        file, _, first = place.rpartition(":")
        line, column, last, end = (int(number) for number in ends.replace("-", ":").split(":"))
        return cls(file, function, int(first), (line, column), (last, end))

    @property
    def lines(self) -> str:
        """The lines, as "line 3" or "lines 3 to 7"."""
        first, last = self.begin[0], self.end[0]
        return f"line {first}" if first == last else f"lines {first} to {last}"


@dataclass(frozen=True, slots=True)
class Block:
    """The statements of a block in a syntax tree: those of `body` from place `first` to place `last`.

    reads         names that the block reads and has not assigned
    writes        names that it assigns and that are read after it, in a fixed order
    uncertain     those of `writes` that it does not assign on every way through it
    changed       names that it reads and whose objects it changes: `rows.append(x)`, `table[key] = x`
    written       names that it reads and whose tensors it may write in place: `y[rows] = x`, `y += x`, `y.add_(x)`
    attributes    attributes of names that it reads, as ("self", "head", "bias"), without those of which it takes an item
    has_return    it is the end of its function, and returns its result
    is_iteration  it is the body of a loop
    """

    body: list[ast.stmt]
    first: int
    last: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    uncertain: frozenset[str]
    changed: frozenset[str]
    written: frozenset[str]
    attributes: frozenset[tuple[str, ...]]
    has_return: bool
    is_iteration: bool

    @property
    def statements(self) -> list[ast.stmt]:
        """The statements."""
        return self.body[self.first : self.last + 1]


@dataclass(frozen=True, slots=True)
class _Level:
    """A list of statements, the place of one of them, and the statements around the list, the innermost first."""

    body: list[ast.stmt]
    place: int
    around: tuple[ast.AST, ...]


def blocks_around(code: CodeType, line: int) -> Iterator[CodeBlock]:
    """Yield the blocks of a function that contain a line, the smallest first; never the whole function."""
    source = source_of(code)
    if source is None:
        return
    seen = set()
    for level in reversed(list(_levels(source.node, line))):
        for first, last in _ranges(level):
            block = _block(source, level, first, last)
            place = _place(code, block) if block is not None else None
            if place is not None and place not in seen:
                seen.add(place)
                yield place


def in_loop(code: CodeType, line: int) -> bool:
    """Return whether a line of a function is inside a loop."""
    source = source_of(code)
    levels = _levels(source.node, line) if source is not None else ()
    return any(isinstance(node, _LOOPS) for level in levels for node in level.around)


def find_block(source: FunctionSource, place: CodeBlock) -> Block | None:
    """Return the block of a function that begins and ends at a place."""
    for level in _levels(source.node, place.begin[0]):
        for first, last in _ranges(level):
            begin, end = _ends(level.body[first], level.body[last])
            if (begin, end) == (place.begin, place.end):
                return _block(source, level, first, last)
    return None


def _place(code: CodeType, block: Block) -> CodeBlock:
    begin, end = _ends(block.statements[0], block.statements[-1])
    return CodeBlock(code.co_filename, code.co_qualname, code.co_firstlineno, begin, end)


def _ends(first: ast.stmt, last: ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    return (first.lineno, first.col_offset), (last.end_lineno or 0, last.end_col_offset or 0)


# -- where blocks may begin and end -------------------------------------------------------------------------------------


def _levels(function: ast.FunctionDef, line: int) -> Iterator[_Level]:
    """Yield the lists of statements around a line, the outermost first."""
    around: tuple[ast.AST, ...] = (function,)
    while around:
        found = next(_inner(around[0], line), None)
        if found is None:
            return
        body, place = found
        yield _Level(body, place, around)
        around = () if isinstance(body[place], _SCOPES) else (body[place], *around)


def _inner(node: ast.AST, line: int) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the list of statements directly inside a node that has one at this line, and the place of that statement."""
    for _, value in ast.iter_fields(node):
        if not isinstance(value, list):
            continue
        for place, part in enumerate(value):
            if isinstance(part, ast.stmt) and part.lineno <= line <= (part.end_lineno or 0):
                yield value, place
            elif isinstance(part, (ast.ExceptHandler, ast.match_case)):
                yield from _inner(part, line)


def _ranges(level: _Level) -> Iterator[tuple[int, int]]:
    """Yield first and last place of the blocks of one list of statements."""
    place, end = level.place, len(level.body) - 1
    yield place, place
    assigned = NameFlow([level.body[place]]).assigned
    readers = [other for other in range(place + 1, end + 1) if assigned & NameFlow([level.body[other]]).first_read]
    if readers:
        yield place, readers[-1]
    if _is_loop_body(level):
        yield 0, end
    elif isinstance(level.around[0], ast.FunctionDef):
        yield place, end


def _is_loop_body(level: _Level) -> bool:
    loop = level.around[0]
    return isinstance(loop, _LOOPS) and level.body is loop.body


# -- what a block reads and writes --------------------------------------------------------------------------------------


def _block(source: FunctionSource, level: _Level, first: int, last: int) -> Block | None:
    """Return a block; None if its statements cannot stand in a function of their own."""
    statements = level.body[first : last + 1]
    is_tail = level.around[0] is source.node and last == len(level.body) - 1
    is_looped = any(isinstance(node, _LOOPS) for node in level.around)
    is_iteration = _is_loop_body(level) and (first, last) == (0, len(level.body) - 1)
    has_return = any(isinstance(node, ast.Return) for node in _walk(statements))
    if is_tail and not any(isinstance(statement, _STATEMENTS) for statement in level.body[:first]):
        return None
    if (has_return and not is_tail) or not _is_closed(statements, is_iteration=is_iteration):
        return None
    flow = NameFlow(statements)
    elsewhere = _read_elsewhere(source.node, statements) | (flow.first_read if is_looped else set())
    writes = () if has_return else tuple(sorted(flow.assigned & elsewhere))
    uncertain = frozenset(writes) - flow.certain
    reads = tuple(sorted(flow.first_read | uncertain))
    changed = frozenset(_changed(statements) & flow.first_read)
    written = frozenset(_written(statements) & flow.first_read)
    attributes = frozenset(_attributes(statements))
    return Block(
        level.body, first, last, reads, writes, uncertain, changed, written, attributes, has_return, is_iteration
    )


def _walk(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield all nodes of statements, but not those inside functions and classes that they define."""
    pending: list[ast.AST] = [*statements]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _SCOPES):
            pending += ast.iter_child_nodes(node)


def _changed(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names whose methods are called, or whose items are assigned or deleted."""
    calls = [node.func for node in _walk(statements) if isinstance(node, ast.Call)]
    holders = [func.value for func in calls if isinstance(func, ast.Attribute)]
    items = [node for node in _walk(statements) if isinstance(node, ast.Subscript)]
    holders += [node.value for node in items if not isinstance(node.ctx, ast.Load)]
    return {holder.id for holder in holders if isinstance(holder, ast.Name)}


def _written(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names whose tensors may be written in place: by an item, an operator with `=`, or a method with a `_` at its end."""
    holders = []
    for node in _walk(statements):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            holders.append(node.value)
        elif isinstance(node, ast.AugAssign):
            holders.append(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            holders.append(node.func.value)
    return {holder.id for holder in holders if isinstance(holder, ast.Name)}


def _attributes(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, ...]]:
    """Yield the longest chains of attributes that begin with a name, but for those of which an item is taken."""
    inner = {id(node.value) for node in _walk(statements) if isinstance(node, (ast.Attribute, ast.Subscript))}
    for node in _walk(statements):
        chain: list[str] = []
        end: ast.AST = node
        while isinstance(end, ast.Attribute) and id(node) not in inner:
            chain.insert(0, end.attr)
            end = end.value
        if chain and isinstance(end, ast.Name):
            yield (end.id, *chain)


def _is_closed(statements: Sequence[ast.stmt], *, is_iteration: bool) -> bool:
    """Return whether no statement leaves the block for a loop around it, deletes a name, or looks at the scope."""
    for node in _walk(statements):
        if isinstance(node, ast.Delete) and any(isinstance(target, ast.Name) for target in node.targets):
            return False
        if isinstance(node, ast.Name) and node.id in _SCOPE_READERS:
            return False
    jumps = [type(node) for node in _jumps(statements)]
    return ast.Break not in jumps and (is_iteration or ast.Continue not in jumps)


def _jumps(statements: Sequence[ast.stmt]) -> Iterator[ast.Break | ast.Continue]:
    """Yield the `break` and `continue` statements of loops around the statements."""
    pending: list[ast.AST] = [*statements]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Break, ast.Continue)):
            yield node
        if isinstance(node, _LOOPS):
            pending += node.orelse
        elif not isinstance(node, _SCOPES):
            pending += ast.iter_child_nodes(node)


def _read_elsewhere(function: ast.FunctionDef, statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that a function reads outside these statements."""
    inside = {id(node) for statement in statements for node in ast.walk(statement)}
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and id(node) not in inside)
    return {node.id for node in names if not isinstance(node.ctx, ast.Store)} | _augmented(function, inside)


def _augmented(function: ast.FunctionDef, inside: set[int]) -> set[str]:
    """Return the names that `+=` and the like read outside the nodes `inside`."""
    found = (node for node in ast.walk(function) if isinstance(node, ast.AugAssign) and id(node) not in inside)
    return {node.target.id for node in found if isinstance(node.target, ast.Name)}

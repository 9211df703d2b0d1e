"""The code of a function whose blocks are functions of their own, called through a route.

    for layer in layers:              for layer in layers:
        if torch.rand(()) > p:   ►        def block(layer, p, x):
            x = layer(x)                      if torch.rand(()) > p:
                                                  x = layer(x)
                                              return locals()
                                          written = route(block, locals())
                                          if "x" in written: x = written["x"]

Lines stay where they are, so tracebacks show the user's file.
"""

from __future__ import annotations
import __future__

import ast
import copy
from collections.abc import Callable, Mapping
from functools import reduce
from types import CodeType, FunctionType
from typing import Any

from pipecompile.tracing.outlining.code_blocks import Block, CodeBlock, find_block
from pipecompile.tracing.outlining.function_source import source_of

__all__ = ["RETURNED", "Route", "close_routes", "original_code", "outlined_code"]

Route = Callable[[Callable[..., Mapping[str, Any]], Mapping[str, Any]], Mapping[str, Any]]
"""Takes a block's function and the local names around it, and returns the names that the block assigns, and their values."""

RETURNED = "return"
"""The name under which a block with a `return` gives its result."""

_BLOCK, _ROUTE, _WRITTEN = "_pipecompile_block_{}", "_pipecompile_route", "_pipecompile_written"
_MARK = "<route {}>"
"""A constant in the syntax tree in the place of a route, which cannot be one there."""

_FLAGS = reduce(int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


def outlined_code(code: CodeType, routes: Mapping[CodeBlock, Route]) -> CodeType | None:
    """Return the code of a function with these blocks outlined; None if it would need other variables of enclosing functions.

    A block inside another one of `routes` is left as it is.
    """
    source = source_of(code)
    assert source is not None
    function = copy.deepcopy(source.node)
    own = type(source)(function, source.class_name)
    blocks = [(place, find_block(own, place)) for place in routes]
    known = {*code.co_varnames, *code.co_cellvars}
    from_the_end = sorted(enumerate(blocks), key=lambda one: one[1][0].begin, reverse=True)  # places before stay
    for number, (place, block) in from_the_end:
        if block is not None and not any(_is_inside(place, other) for other, _ in blocks):
            _outline(block, known, number)
    function.decorator_list, function.returns = [], None
    new = _compiled(function, source.class_name, code)
    if new is None or new.co_freevars != code.co_freevars:
        return None
    inner = {
        one.co_name: one.replace(co_qualname=code.co_qualname) for one in new.co_consts if isinstance(one, CodeType)
    }
    marks = {
        _MARK.format(number): _Route(route, code, inner.get(_BLOCK.format(number)))
        for number, route in enumerate(routes.values())
    }
    constants = [marks.get(one, one) if isinstance(one, str) else one for one in new.co_consts]
    return new.replace(co_consts=tuple(constants), co_qualname=code.co_qualname)


def original_code(code: CodeType) -> CodeType:
    """Return the code that an outlined code was made of; any other code as it is."""
    return next((constant.original for constant in code.co_consts if isinstance(constant, _Route)), code)


def close_routes(code: CodeType) -> None:
    """Forget the routes of an outlined code that no longer runs. Python's collector does not look into code objects, and would not free
    what the routes hold.
    """
    for constant in code.co_consts:
        if isinstance(constant, _Route):
            constant.route = None


class _Route:
    """A route as a constant of outlined code, which also has the original code, and that of the block.

    The recorder rewrites the names of builtins in codes for a while. The block that is kept has its code as it was.
    """

    def __init__(self, route: Route, original: CodeType, block: CodeType | None) -> None:
        self.original, self.block = original, block
        self.route: Route | None = route

    def __call__(self, block: FunctionType, scope: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self.block is not None
        assert self.route is not None
        return self.route(
            FunctionType(self.block, block.__globals__, self.block.co_name, None, block.__closure__), scope
        )


def _is_inside(place: CodeBlock, other: CodeBlock) -> bool:
    return place != other and other.begin <= place.begin and place.end <= other.end


# -- the syntax tree ------------------------------------------------------------------------------------------------------


def _outline(block: Block, known: set[str], number: int) -> None:
    """Replace the statements of a block by a function and its call."""
    statements = block.statements
    first = statements[0]
    reads = [name for name in block.reads if name in known]
    name = _BLOCK.format(number)
    inner = _parsed(f"def {name}({', '.join(reads)}): pass", first)
    assert isinstance(inner[0], ast.FunctionDef)
    exits = _Exits(block.is_iteration)
    end = _parsed(f"return {{{RETURNED!r}: None}}" if block.has_return else "return locals()", statements[-1])
    inner[0].body = [*(exits.visit(statement) for statement in statements), *end]
    call = f"{_ROUTE} = {_MARK.format(number)!r}\n{_WRITTEN} = {_ROUTE}({name}, locals())\n"
    if block.has_return:
        call += f"return {_WRITTEN}[{RETURNED!r}]\n"
    else:
        call += "".join(f"if {name!r} in {_WRITTEN}: {name} = {_WRITTEN}[{name!r}]\n" for name in block.writes)
    block.body[block.first : block.last + 1] = [*inner, *_parsed(call, first)]


def _parsed(text: str, place: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a text, all at the line of a statement."""
    statements = ast.parse(text).body
    for statement in statements:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, place)
                node.end_lineno, node.end_col_offset = place.lineno, place.col_offset  # type: ignore[attr-defined]
    return statements


class _Exits(ast.NodeTransformer):
    """Let `return` and, in an iteration, `continue` end the function of a block."""

    def __init__(self, is_iteration: bool) -> None:
        self.is_iteration, self.depth = is_iteration, 0

    def visit(self, node: ast.AST) -> Any:
        """Return what replaces a node; functions and classes inside the block stay as they are."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return node
        return self._loop(node) if isinstance(node, (ast.For, ast.While)) else super().visit(node)

    def visit_Return(self, node: ast.Return) -> Any:
        value = self.visit(node.value) if node.value is not None else ast.Constant(None)
        result = ast.Return(ast.Dict([ast.Constant(RETURNED)], [value]))
        return ast.fix_missing_locations(ast.copy_location(result, node))

    def visit_Continue(self, node: ast.Continue) -> Any:
        return _parsed("return locals()", node) if self.is_iteration and not self.depth else node

    def _loop(self, node: ast.For | ast.While) -> Any:
        self.depth += 1
        node.body = [one for part in node.body for one in _listed(self.visit(part))]
        self.depth -= 1
        node.orelse = [one for part in node.orelse for one in _listed(self.visit(part))]
        return node


def _listed(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


# -- the code -----------------------------------------------------------------------------------------------------------


def _compiled(function: ast.FunctionDef, class_name: str, code: CodeType) -> CodeType | None:
    """Return the code of a function that has the variables of enclosing functions that `code` has."""
    free = [name for name in code.co_freevars if name != "__class__"]
    body: ast.stmt = function
    if class_name:
        body = ast.ClassDef(class_name, [], [], [function], [])
    factory = ast.parse(f"def factory({', '.join(free)}): pass").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body = [body]
    tree = ast.fix_missing_locations(ast.Module([factory], []))
    made: CodeType = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FLAGS, dont_inherit=True)
    for name in ("factory", *([class_name] if class_name else []), function.name):
        made = next(one for one in made.co_consts if isinstance(one, CodeType) and one.co_name == name)
    return made

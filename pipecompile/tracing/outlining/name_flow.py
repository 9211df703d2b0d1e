"""The flow of local names through statements: which are read before they are assigned, and which are assigned for certain.

y = f(x)            first read   f, x
if y > 0:           assigned     y, z
    z = y           certain      y          z is assigned on one of two ways
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["NameFlow"]


class NameFlow(ast.NodeVisitor):
    """The names of some statements.

    first_read   names that may be read before the statements assign them, globals included
    assigned     names that the statements may assign
    certain      names that are assigned, however the statements end
    """

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.first_read: set[str] = set()
        self.assigned: set[str] = set()
        self.certain: set[str] = set()
        self._visit_all(statements)

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit(self, node: ast.AST) -> None:
        """Visit a node and what is inside it, in the order in which Python runs them."""
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            self._comprehension(node)
        elif isinstance(node, (ast.Try, ast.TryStar)):
            self._try(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self._assign(alias.asname or alias.name.partition(".")[0])
        else:
            super().visit(node)

    @contextmanager
    def _perhaps(self) -> Iterator[None]:
        """Take nothing that the block assigns as certain behind it."""
        before = set(self.certain)
        yield
        self.certain = before

    def _read(self, name: str) -> None:
        if name not in self.certain:
            self.first_read.add(name)

    def _assign(self, name: str) -> None:
        self.assigned.add(name)
        self.certain.add(name)

    # -- names and expressions --------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._assign(node.id)
        else:
            self._read(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit_all((node.value, node.target))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        with self._perhaps():
            self._visit_all(node.values[1:])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        for branch in (node.body, node.orelse):
            with self._perhaps():
                self.visit(branch)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Take every name that a function reads, and that is not a parameter of it, as read where it is defined."""
        self._visit_all((*node.args.defaults, *node.args.kw_defaults))
        parameters = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        body: list[ast.AST] = [*node.body] if isinstance(node.body, list) else [node.body]
        inner = (one for part in body for one in ast.walk(part) if isinstance(one, ast.Name))
        for name in {one.id for one in inner if isinstance(one.ctx, ast.Load)} - parameters:
            self._read(name)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Take the targets of a comprehension as known inside it, and as unknown behind it."""
        assigned, certain = set(self.assigned), set(self.certain)
        for part in node.generators:
            self._visit_all((part.iter, part.target, *part.ifs))
        self._visit_all((node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,))
        self.assigned, self.certain = assigned, certain
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self.assigned.add(inner.target.id)

    # -- statements -------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all((node.value, *node.targets))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None or not isinstance(node.target, ast.Name):
            self._visit_all((node.value, node.target))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self._visit_all((node.value, node.target))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = set(self.certain)
        self._visit_all(node.body)
        then, self.certain = self.certain, before
        self._visit_all(node.orelse)
        self.certain &= then

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        with self._perhaps():
            self._visit_all((node.target, *node.body))
        with self._perhaps():
            self._visit_all(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        with self._perhaps():
            self._visit_all(node.body)
        with self._perhaps():
            self._visit_all(node.orelse)

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        with self._perhaps():
            self._visit_all((*node.body, *node.orelse))
        for handler in node.handlers:
            with self._perhaps():
                self.visit(handler)
        self._visit_all(node.finalbody)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._assign(node.name)
        self._visit_all((node.type, *node.body))

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            with self._perhaps():
                self._visit_all((case.pattern, case.guard, *case.body))

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name:
            self._assign(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._assign(node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_all(node.decorator_list)
        self._function(node)
        self._assign(node.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                self._read(inner.id)
        self._assign(node.name)

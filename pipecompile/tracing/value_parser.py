"""Read values of a traced graph from their text; the grammar is in `graph_text`.

Expressions are parsed by Python's `ast` and never evaluated. Tensors become fake tensors, and expressions in the symbols become
symbolic numbers of a ShapeEnv that knows an example for each symbol.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipecompile.errors import InputError
from pipecompile.torch_private import pytree
from pipecompile.torch_private import symbols as torch_symbols
from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.qualified_names import Named

__all__ = ["ValueReader", "literal", "structure_of"]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.FloorDiv: torch_symbols.FloorDiv, ast.Mod: sympy.Mod,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge, ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne,
}  # fmt: skip
_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}
_NUMBERS = (int, float, complex)


def literal(text: str) -> ast.expr:
    """Return the syntax tree of an expression. Raises InputError."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{text!r} cannot be read", why=str(error)) from None


class ValueReader:
    """Reads the values of one graph. `device` is that of the recording, `examples` has a number for each symbol."""

    def __init__(self, device: torch.device, examples: Mapping[str, int]) -> None:
        self.device, self.examples = device, examples
        self.env = ShapeEnv()
        self.fake = FakeTensorMode(shape_env=self.env)
        self.symbols: dict[str, sympy.Symbol] = {}

    def symbol(self, name: str) -> sympy.Symbol:
        """Return the symbol of a size."""
        return self.symbols.setdefault(name, sympy.Symbol(name, integer=True, positive=True))

    def read(self, tree: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
        """Return a value; with `names`, an argument, in which each other name is one of these."""
        if isinstance(tree, ast.Constant):
            return tree.value
        if isinstance(tree, ast.Name) and tree.id in _CONSTANTS:
            return _CONSTANTS[tree.id]
        if isinstance(tree, ast.Name) and names is not None:
            if tree.id not in names:
                raise InputError(f"{tree.id!r} is not a node above this line")
            return names[tree.id]
        if isinstance(tree, (ast.Tuple, ast.List)):
            items = [self.read(item, names) for item in tree.elts]
            return tuple(items) if isinstance(tree, ast.Tuple) else items
        if isinstance(tree, ast.Dict):
            pairs = zip(tree.keys, tree.values, strict=True)
            return {self.read(key, names): self.read(item, names) for key, item in pairs if key is not None}
        return self._compound(tree, names)

    def _compound(self, tree: ast.expr, names: Mapping[str, Any] | None) -> Any:
        if isinstance(tree, ast.Subscript) or (isinstance(tree, ast.Attribute) and tree.attr == "grad"):
            return self.tensor(tree)
        if isinstance(tree, ast.Attribute):
            return self._of_torch(tree)
        if isinstance(tree, ast.Call):
            word = tree.func.id if isinstance(tree.func, ast.Name) else ""
            if isinstance(tree.func, ast.Attribute) and tree.func.attr == "on":
                return self.tensor(tree)
            if word in ("device", "named"):
                text = ast.literal_eval(tree.args[0])
                return torch.device(text) if word == "device" else Named(text)
            if word == "slice":
                return slice(*(self.read(item, names) for item in tree.args))
        if (number := _number(tree)) is not None:
            return number
        return self._symbolic(tree)

    def _of_torch(self, tree: ast.Attribute) -> Any:
        """Return a dtype, layout or memory format."""
        found = getattr(torch, tree.attr, None) if ast.unparse(tree.value) == "torch" else None
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise InputError(f"{ast.unparse(tree)} is not a dtype, layout or memory format")
        return found

    # -- tensors and symbolic numbers -----------------------------------------------------------------------------

    def tensor(self, tree: ast.expr, device: str | None = None) -> torch.Tensor:
        """Return a fake tensor, on the device of the recording unless its text or `device` says otherwise."""
        grad = isinstance(tree, ast.Attribute)
        tree = tree.value if isinstance(tree, ast.Attribute) else tree
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute):
            device, tree = ast.literal_eval(tree.args[0]), tree.func.value
        if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
            raise InputError(f"{ast.unparse(tree)} is not a tensor", hint="write a tensor as float32[2, 3]")
        dtype = getattr(torch, tree.value.id, None)
        if not isinstance(dtype, torch.dtype):
            raise InputError(f"{tree.value.id} is not a dtype")
        sizes = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        shape = [self.read(size) for size in sizes]
        with self.fake, self.env.suppress_guards():
            made = torch.empty(shape, dtype=dtype, device=device or self.device)
        return made.requires_grad_(grad)

    def _symbolic(self, tree: ast.expr) -> Any:
        """Return a symbolic number."""
        kind = tree.func.id if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) else ""
        expression = self.expression(tree.args[0] if kind in ("float", "bool") and isinstance(tree, ast.Call) else tree)
        hint = expression.subs({self.symbol(name): example for name, example in self.examples.items()})
        known = hint.is_number or hint in (sympy.true, sympy.false)
        if kind == "float":
            return self.env.create_symfloatnode(expression, hint=float(hint) if known else None)
        if kind == "bool":
            return torch.SymBool(SymNode(expression, self.env, bool, bool(hint) if known else None))
        return self.env.create_symintnode(expression, hint=int(hint) if known else None)

    def expression(self, tree: ast.expr) -> Any:
        """Return an expression in the symbols."""
        if isinstance(tree, ast.Constant) and type(tree.value) in (bool, int, float):  # sympy evaluates a text as code
            return sympy.sympify(tree.value)
        if isinstance(tree, ast.Name):
            return self.symbol(tree.id)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self.expression(tree.operand)
        if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
            left, right = self.expression(tree.left), self.expression(tree.right)
            if isinstance(tree.op, ast.Pow) and not _is_small(left, right):
                raise InputError(f"{ast.unparse(tree)} is too large for a size")
            return _BINARY[type(tree.op)](left, right)
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _COMPARE:
            return _COMPARE[type(tree.ops[0])](self.expression(tree.left), self.expression(tree.comparators[0]))
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            return _function(tree.func.id)(*map(self.expression, tree.args))
        raise InputError(f"{ast.unparse(tree)} is not an expression in sizes")


_FUNCTIONS = frozenset(
    "Abs And Eq Ge Gt Le Lt Max Min Mod Ne Not Or Rational cbrt ceiling cos exp floor log root sin sqrt tan".split()
)
"""Functions of sympy that torch's expressions in sizes have. Others compute for hours, or evaluate code."""
_MOST_BITS = 4096
"""Bits of the largest number that a power in a guard may have: sizes have 63."""


def _is_small(base: Any, exponent: Any) -> bool:
    """Return whether a power of two numbers, if they are numbers, is quick to compute."""
    if not base.is_number:
        return not exponent.is_number or abs(exponent) <= _MOST_BITS
    return bool(exponent.is_number and abs(exponent) * (abs(base) + 2).evalf(5).log(2) <= _MOST_BITS)


def _function(name: str) -> Callable[..., Any]:
    found = torch_symbols.function_named(name) or (getattr(sympy, name) if name in _FUNCTIONS else None)
    if found is None:
        raise InputError(f"{name} is not a function of sizes")
    function: Callable[..., Any] = found
    return function


def _number(tree: ast.expr) -> Any:
    """Return a negative, infinite or complex number; None for another expression."""
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        operand = tree.operand
        if isinstance(operand, ast.Name) and operand.id in _CONSTANTS:
            return -_CONSTANTS[operand.id]
        return -operand.value if isinstance(operand, ast.Constant) and isinstance(operand.value, _NUMBERS) else None
    if isinstance(tree, ast.BinOp) and isinstance(tree.right, ast.Constant) and isinstance(tree.right.value, complex):
        return ast.literal_eval(tree)
    return None


_LEAF = pytree.tree_structure(0)


def structure_of(tree: ast.expr, reader: ValueReader) -> pytree.TreeSpec:
    """Return the structure of inputs or outputs."""
    if isinstance(tree, (ast.Tuple, ast.List)):
        kind = tuple if isinstance(tree, ast.Tuple) else list
        return pytree.TreeSpec(kind, None, [structure_of(item, reader) for item in tree.elts])
    if isinstance(tree, ast.Dict):
        keys = [reader.read(key) for key in tree.keys if key is not None]
        return pytree.TreeSpec(dict, keys, [structure_of(item, reader) for item in tree.values])
    if isinstance(tree, ast.Call):
        context, *inner = tree.args
        return pytree.TreeSpec(
            reader.read(tree.func), reader.read(context), [structure_of(item, reader) for item in inner]
        )
    return _LEAF

"""Underscored names of torch appear in pipecompile/torch_private/ alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

PACKAGE = Path(__file__).parents[2] / "pipecompile"

OF_PYTHON = {
    "_current_frames",
    "_getframe",
    "_lru_cache_wrapper",
    "_value_",
    "_name_",
    "_replace",
    "_fields",
    "_asdict",
}

_OBJECTS = (
    nn.Linear(1, 1),
    nn.BatchNorm1d(1),
    torch.zeros(1),
    torch.zeros(1).untyped_storage(),
    torch.ones(1, requires_grad=True).exp().grad_fn,
    torch.ops.aten.add.Tensor,
    fx.Graph(),
    next(iter(fx.symbolic_trace(nn.Linear(1, 1)).graph.nodes)),
)
OF_TORCH = {name for thing in _OBJECTS for name in dir(thing) if name.startswith("_") and not name.startswith("__")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_ours(value: ast.expr) -> bool:
    """Return True for `self`, `cls` and `super(...)`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a file itself defines or assigns."""
    nodes = list(ast.walk(tree))
    assigned = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return assigned | {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each use of a private name that is not the file's own."""
    own = own_names(tree)
    of_torch = OF_TORCH - own
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_PYTHON:
            is_own = is_ours(node.value) or node.attr in own - OF_TORCH
            if not is_own or node.attr in of_torch:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            path = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, path)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch" and any(map(is_private, alias.name.split("."))):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OF_TORCH:
            yield node.lineno, repr(node.value)  # getattr(module, "_modules")


def test_private_names_of_torch_are_used_in_torch_private_alone() -> None:
    found = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.parent.name != "torch_private"
        for line, name in private_names(ast.parse(file.read_text()))
    ]
    assert not found, "wrap these names in pipecompile/torch_private/:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._get_x()",
        "module._modules",
        "self._modules",
        "fx.node._x",
        "from torch._dynamo import source",
        "from torch.fx._x import y",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        'getattr(module, "_parameters")',
    ],
)
def test_a_private_name_of_torch_is_found(line: str) -> None:
    assert len({found for found, _ in private_names(ast.parse(line))}) == 1


@pytest.mark.parametrize(
    "line", ["self._table", "super()._x()", "sys._getframe(1)", "torch.utils", '"_mine"', "__all__"]
)
def test_other_names_are_not(line: str) -> None:
    assert not list(private_names(ast.parse(line)))

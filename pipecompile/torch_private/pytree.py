"""Nested containers of values and their leaves: torch's own pytree, which `torch.export` and fx use as well.

`torch.utils.pytree`, its public successor, has other names, and no keys for the paths of leaves.

`tree_leaves` and `tree_map` walk tuples, lists and dicts by themselves, which takes a fifth of the time: a compile calls them 10,000 times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree  # 2.11
from torch.utils._pytree import (  # 2.11
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "children_of_spec",
    "GetAttrKey",
    "MappingKey",
    "TreeSpec",
    "is_registered",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]


def children_of_spec(spec: TreeSpec) -> list[TreeSpec]:
    """Return the structures of the children of a structure."""
    return list(spec.children()) if hasattr(spec, "children") else list(spec.children_specs)


def is_registered(kind: type) -> bool:
    """Return whether pytrees take objects of a class apart: it is registered, or a namedtuple."""
    return kind in SUPPORTED_NODES or hasattr(kind, "_fields")


_IsLeaf = Callable[[Any], bool]


def tree_leaves(tree: Any, is_leaf: _IsLeaf | None = None) -> list[Any]:
    """Return the leaves of a nested container, in order. What `is_leaf` is true of is not taken apart."""
    leaves: list[Any] = []
    _gather(tree, is_leaf, leaves)
    return leaves


def _gather(tree: Any, is_leaf: _IsLeaf | None, leaves: list[Any]) -> None:
    kind = type(tree)
    if is_leaf is not None and is_leaf(tree):
        leaves.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _gather(item, is_leaf, leaves)
    elif kind is dict:
        for item in tree.values():
            _gather(item, is_leaf, leaves)
    elif kind in SUPPORTED_NODES or issubclass(kind, tuple):
        leaves += _pytree.tree_leaves(tree, is_leaf)
    else:
        leaves.append(tree)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any, is_leaf: _IsLeaf | None = None) -> Any:
    """Return a nested container with each leaf replaced by `function(leaf)`; `others` have further arguments at the same places."""
    if others:
        return _pytree.tree_map(function, tree, *others, is_leaf=is_leaf)
    kind = type(tree)
    if is_leaf is not None and is_leaf(tree):
        return function(tree)
    if kind is tuple:
        return tuple([tree_map(function, item, is_leaf=is_leaf) for item in tree])
    if kind is list:
        return [tree_map(function, item, is_leaf=is_leaf) for item in tree]
    if kind is dict:
        return {key: tree_map(function, item, is_leaf=is_leaf) for key, item in tree.items()}
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):
        return _pytree.tree_map(function, tree, is_leaf=is_leaf)
    return function(tree)

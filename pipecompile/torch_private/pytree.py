"""Nested containers of values and their leaves: torch's own pytree, which `torch.export` and fx use as well.

`torch.utils.pytree`, its public successor, has other names, and no keys for the paths of leaves.
"""

from __future__ import annotations

from torch.utils._pytree import (  # 2.11
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
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

"""Containers are taken apart and put together as torch does."""

from __future__ import annotations

import pytest
import torch

from pipecompile.torch_private import pytree

pytestmark = pytest.mark.smoke

VALUE = {"a": [torch.ones(1), 2], "b": (None,)}


def test_leaves_and_structure_give_the_value_back() -> None:
    leaves, spec = pytree.tree_flatten(VALUE)
    assert leaves == pytree.tree_leaves(VALUE)
    assert spec == pytree.tree_structure(VALUE)
    assert isinstance(spec, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, spec) == VALUE


def test_maps_keep_the_structure() -> None:
    assert pytree.tree_map(str, {"a": [1, 2]}) == {"a": ["1", "2"]}
    assert pytree.tree_map_only(int, lambda number: -number, {"a": [1, "2"]}) == {"a": [-1, "2"]}


def test_paths_name_keys() -> None:
    ((path, _),), _ = pytree.tree_flatten_with_path({"a": 1})
    assert path == (pytree.MappingKey("a"),)

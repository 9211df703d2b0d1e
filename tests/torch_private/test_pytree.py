"""Containers are taken apart and put together as torch does."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree

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


Pair = namedtuple("Pair", "left right")  # noqa: PYI024


class Words(list):
    """A list that no pytree takes apart."""


TREES = (
    1, None, (), [], {}, (1, [2, {"b": 3, "a": (None, "x")}]), Pair([1, 2], {"c": 3}), OrderedDict(b=1, a=[2]), Words([1, 2]),
    [immutable_list([1, [2]]), immutable_dict({"a": (3,)})], (slice(1, 2), {1: Pair(1, (2,))}), torch.ones(2, 3).max(0),
)  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("is_leaf", [None, lambda one: isinstance(one, (dict, Pair))], ids=["none", "mappings"])
def test_leaves_and_maps_are_those_of_torch(tree, is_leaf) -> None:
    assert list(map(id, pytree.tree_leaves(tree, is_leaf))) == list(map(id, _pytree.tree_leaves(tree, is_leaf)))
    own = pytree.tree_map(lambda one: (str(one),), tree, is_leaf=is_leaf)
    expected = _pytree.tree_map(lambda one: (str(one),), tree, is_leaf=is_leaf)
    assert own == expected
    assert repr(own) == repr(expected)


def test_maps_of_two_trees() -> None:
    assert pytree.tree_map(lambda one, two: one + two, {"a": [1, 2]}, {"a": [3, 4]}) == {"a": [4, 6]}

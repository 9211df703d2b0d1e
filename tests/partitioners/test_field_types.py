"""A problem with fields of other types is refused with the right form, and never ends in an error of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipecompile.errors import VerifyError
from pipecompile.partitioners import Node, Problem, Shared, Tensor, partition
from pipecompile.partitioners.field_types import type_faults

NODES = (Node("a", 3.0, 1.0, 10.0, 1.0), Node("b", 3.0, 1.0, 10.0, 1.0))
WRONG: Any = [
    ({"nodes": None}, "nodes is None, expected a tuple: nodes="),
    ({"nodes": ("a",)}, "node 0 is 'a', expected a Node"),
    ({"nodes": (Node("a", "1"),)}, "time of node 'a' is '1', expected a number"),
    ({"nodes": (Node("a", True),)}, "time of node 'a' is True, expected a number"),
    ({"nodes": (Node("a", 10**400),)}, "expected at most 1e[+]100"),
    ({"nodes": (Node("a", 10**5000),)}, "time of node 'a' is a number of thousands of digits, expected at most 1e[+]100"),
    ({"nodes": (Node(1),)}, "name of node 0 is 1, expected a text"),
    ({"precedence": (("a", "b", "a"),)}, "precedence 0 is .*, expected a pair of names"),
    ({"precedence": None}, "precedence is None, expected a tuple"),
    ({"tensors": (("a", ("b",)),)}, "tensor 0 is .*, expected a Tensor"),
    ({"tensors": (Tensor("a", "b"),)}, "tensor 0 is .*, expected a name and a tuple of names"),
    ({"tensors": (Tensor("a", ("b",), None),)}, "time of tensor 0 is None, expected a number"),
    ({"memory_limit": "1GiB"}, "memory_limit is '1GiB', expected None, bytes, or bytes per device"),
    ({"memory_limit": True}, "memory_limit is True, expected None, bytes"),
    ({"in_flight": 2}, r"in_flight is 2, expected None, or a number per stage: in_flight=[(]2.0, 1.0[)]"),
    ({"speed": 1.0}, "speed is 1.0, expected None, or a number per device"),
    ({"placement": (0.5, 1)}, r"placement\[0\] is 0.5, expected None, or a device per stage"),
    ({"placement": "01"}, "placement is '01', expected None, or a device per stage"),
    ({"links": ((None, 1), (1, 1))}, r"links\[0\] is .*, expected None, or a row of numbers per device"),
    ({"shared": (("a",),)}, "shared 0 is .*, expected a Shared"),
    ({"shared": (Shared("ab", 1.0),)}, "nodes of shared 0 is 'ab', expected a tuple of names"),
    ({"pins": [("a", 0)]}, 'pins is .*, expected a dict of the stages of nodes: pins={"a": 0}'),
    ({"pins": {"a": 0.5}}, "pins has 'a': 0.5, expected a name and a stage"),
    ({"recompute": True}, 'recompute is True, expected None, "auto", or a flag per stage'),
    ({"recompute": "always"}, "recompute is 'always', expected None"),
    ({"groups": ("a", "b")}, "group 0 is 'a', expected a tuple of names"),
    ({"multicast": "no"}, "multicast is 'no', expected a bool: multicast=True"),
    ({"name": 3}, "name is 3, expected a text"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_types_are_refused_with_the_right_form(fields: dict[str, Any], message: str) -> None:
    problem = Problem(**{"nodes": NODES, **fields})
    with pytest.raises(VerifyError, match=message):
        partition(problem, 2)


def test_lists_become_tuples() -> None:
    links = [[1.0, 2.0], [2.0, 1.0]]
    lists = Problem(
        list(NODES), [["a", "b"]], [Tensor("a", ["b"])], speed=[1.0, 0.5], links=links, shared=[Shared(["a"])]
    )  # type: ignore[arg-type, list-item]
    tuples = Problem(
        NODES, (("a", "b"),), (Tensor("a", ("b",)),), speed=(1.0, 0.5), links=((1.0, 2.0), (2.0, 1.0)), shared=(Shared(("a",)),)
    )  # fmt: skip
    assert lists == tuples
    assert partition(lists, 2).stage_of == partition(tuples, 2).stage_of
    limited = Problem(NODES, memory_limit=[1e9, 1e9])  # type: ignore[arg-type]
    assert partition(limited, 2).stage_of == {"a": 0, "b": 1}


def test_numbers_of_numpy_are_numbers() -> None:
    problem = Problem((Node("a", np.float32(1.0)),), memory_limit=np.float32(9.0), pins={"a": np.int64(0)})  # type: ignore[arg-type, dict-item]
    assert type_faults(problem) == []

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from pipecompile.tracing.forms import is_object, taken_apart


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Boxes:
    rows: torch.Tensor
    sizes: list


class Holder:
    def __init__(self, boxes) -> None:
        self.boxes, self.word = boxes, "word"


def test_values_are_put_together_as_they_were():
    a, b = torch.zeros(2), torch.ones(3)
    value = {"pair": Pair(a, [1, None]), "more": (Holder(Boxes(b, [(4, 5)])), OrderedDict(x=2.5)), "text": "t"}
    leaves, form = taken_apart(value)
    assert [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)] == [id(a), id(b)]
    again = form.put_together(leaves)
    assert again["pair"].left is a
    assert again["pair"].right == [1, None]
    holder = again["more"][0]
    assert type(holder) is Holder
    assert holder is not value["more"][0]
    assert holder.boxes.rows is b
    assert (holder.boxes.sizes, holder.word) == ([(4, 5)], "word")
    assert taken_apart(again)[1] == form


def test_forms_differ_when_the_structure_does():
    one = taken_apart([Holder(Boxes(torch.zeros(1), [1]))])[1]
    assert one == taken_apart([Holder(Boxes(torch.ones(7), [1]))])[1]
    assert one != taken_apart([Holder(Boxes(torch.zeros(1), [1, 2]))])[1]
    assert one != taken_apart([Boxes(torch.zeros(1), [1])])[1]


def test_what_is_no_object_with_tensors_is_a_leaf():
    holder = Holder(None)
    holder.boxes = holder
    for value in (3, "x", nn.Linear(1, 1), torch.zeros(1), Holder, len, holder, torch.float32):
        assert not is_object(value)
        assert taken_apart(value)[0] == [value]

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from bodies import Body
from torch import nn
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

import pipecompile as pc
from pipecompile.batching.containers import flatten_containers, has_attributes, with_tensors


@dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


class Groups(defaultdict):  # type: ignore[type-arg]
    pass


class Latest(deque):  # type: ignore[type-arg]
    pass


class Pair(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Named:
    rows: Any
    note: str = "n"


def late(a: Any, b: Any) -> Output:
    """Return an output whose items are in another order than its fields, with an attribute that is not an item."""
    output = Output(hidden=a)
    output["logits"] = b
    object.__setattr__(output, "double", a * 2)
    return output


def with_other_key(a: Any, b: Any) -> Output:
    output = Output(logits=a)
    output["other"] = b
    return output


def reset(a: Any, b: Any) -> Output:
    output = Output(logits=a, hidden=b)
    output.logits = None
    return output


def pairs(a: Any, b: Any) -> Output:
    output = Output()
    output["loss"] = (("logits", a), ("hidden", b))
    return output


def moved(a: Any, b: Any) -> Any:
    ordered = Ordered(x=a, y=b)
    ordered.move_to_end("x")
    return ordered


def noted(a: Any, b: Any) -> Any:
    ordered: Any = OrderedDict(x=a)
    ordered.more = b
    return ordered


def grouped(a: Any, b: Any) -> Any:
    groups = Groups(list)
    groups["z"].append(a)
    groups["a"].append(b)
    return groups


MAKE = [
    late, with_other_key, reset, pairs, moved, noted, grouped, lambda a, b: late(a, [late(b, a), b]), lambda a, b: Latest([a, b, b], maxlen=2),
    lambda a, b: Counter(z=a, a=b), lambda a, b: Pair(y=a, x=b), lambda a, b: [(a,), {"z": late(a, b)}], lambda a, b: Named(late(a, b)),
]  # fmt: skip


def content(value: Any) -> Any:
    """Return all that code can read of a value: class, items and attributes in order, what indices give."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, (list, tuple, deque))
        else []
    )
    if not items and not hasattr(value, "__dict__"):
        return value
    by_index = value.to_tuple() if isinstance(value, ModelOutput) else ()
    attributes = list(getattr(value, "__dict__", {}).items())
    special = (getattr(value, "default_factory", None), getattr(value, "maxlen", None))
    return type(value), special, [content(one) for one in (*items, *by_index, *attributes)]


@pytest.mark.parametrize("make", MAKE)
def test_a_value_is_put_together_as_it_was(make: Any) -> None:
    value = make(torch.ones(2), torch.ones(3) * 2)
    leaves, structure = flatten_containers(value)
    again = pytree.tree_unflatten(leaves, structure)
    assert content(again) == content(value)
    assert flatten_containers(again)[1] == structure
    assert content(with_tensors(value, lambda one: one * 3)) == content(make(torch.ones(2) * 3, torch.ones(3) * 6))


def test_an_attribute_that_is_an_item_stays_the_same_object() -> None:
    output = with_tensors(Output(logits=[torch.zeros(2)]), torch.clone)
    assert output.logits is output["logits"]
    assert [has_attributes(one) for one in (output, {}, OrderedDict(a=1), Pair(1), Ordered(a=1))] == [True] + [
        False
    ] * 4


def test_outputs_of_a_pipeline_are_those_of_the_model_by_index() -> None:
    makes = (late, moved, grouped, noted, pairs)
    model = Body(lambda m, x: [make(m.a(x), m.b(x)) for make in makes])
    x = torch.randn(8, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", partitioner="dp")
    assert str(content(pipe(x))) == str(content(model(x)))


def test_a_loss_that_indexes_the_output_and_a_target_and_its_second_value() -> None:
    def loss(output: Any, target: Any) -> Any:
        value = ((output[0] - target[0]) ** 2 + output[1] * target[1] + output.double * target.double).mean()
        return value, late(output[0], output[1])

    model, x = Body(lambda m, x: late(m.a(x), m.b(x))), torch.randn(8, 4)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=2, loss_fn=loss, has_aux=True, cost="analytic", partitioner="dp"
    )
    target = late(x, x * 3)
    value, aux = pipe.step(x, target=target)
    torch.testing.assert_close(value, loss(model(x), target)[0].detach())
    assert [one.double.requires_grad for one in aux] == [False, False]
    assert [*aux[0]] == ["hidden", "logits"]


class Decides(nn.Module):
    """A piece that is kept whole, since Python decides by a value."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, *values: Any) -> Any:
        for _ in range(2):
            if float(flatten_containers(values)[0][0].sum()) > 1e9:
                return None
        return self.body(*values)


@pytest.mark.parametrize("make", [late, moved, lambda a, b: Named([a, b])])
def test_pieces_take_and_return_objects_and_their_rows_are_joined(make: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        given = m.back(make(m.a(x), m.b(x)))
        return torch.stack(flatten_containers(m.out(given))[0][:2], 1)

    model, x = Body(body), torch.randn(8, 4)
    model.back, model.out = (
        Decides(lambda given: flatten_containers(given)[0][1] * 2),
        Decides(lambda one: make(one, one + 1)),
    )
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", partitioner="dp")
    assert torch.equal(pipe(x), model(x))


def test_an_object_that_a_call_leaves_on_the_model_is_of_its_class() -> None:
    def body(m: Any, x: Any) -> Any:
        m.last = late(m.b(x), m.a(x))
        return m.last[0] * 2

    model, x = Body(body), torch.randn(4, 4)
    model.last = None
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=1, cost="analytic", partitioner="dp")
    pipe(x)
    left = content(model.last)
    model(x)
    assert str(left) == str(content(model.last))

from __future__ import annotations

import enum
import types
from collections import UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bodies import Body
from torch.utils import _pytree as pytree
from transformers import DynamicCache
from transformers.utils import ModelOutput

import pipecompile as pc
from pipecompile import TraceError
from pipecompile.batching.containers import check_rereadable, flatten_containers, on_device, shell_of, with_shells
from pipecompile.tracing import trace

Point = namedtuple("Point", "x y")  # noqa: PYI024


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Result:
    x: Any
    note: str = "n"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    rest: list[Any] = field(default_factory=list)


@dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None
    past: Any = None


class Slotted:
    __slots__ = ("__hidden", "x")

    def __init__(self, x: Any) -> None:
        self.x, self.__hidden = x, 3


class Named(dict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Pile(list):
    pass


class Pair(tuple):
    __slots__ = ()


class Cache:
    def __init__(self) -> None:
        self.keys: dict[int, Any] = {}

    def put(self, x: Any) -> Cache:
        self.keys[len(self.keys)] = x
        return self


MAKE = [
    Result, Frozen, Slotted, lambda x: Frozen(Result(x), [x + 1, {"k": Slotted(x)}]), lambda x: Point(x, [x]), lambda x: Named(x=x),
    lambda x: Pile([x]), lambda x: Pair([x]), lambda x: UserDict(x=x), lambda x: types.SimpleNamespace(x=x), lambda x: Cache().put(x),
    lambda x: deque([x], maxlen=2), lambda x: defaultdict(list, x=[x]), lambda x: Output(logits=x), lambda x: {None: x, Mode.FAST: 3},
]  # fmt: skip


def first(value: Any) -> torch.Tensor:
    return next(leaf for leaf in pytree.tree_leaves(with_shells(value)) if isinstance(leaf, torch.Tensor))


def look(value: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(with_shells(value))
    return type(value), spec, tuple(leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


@pytest.mark.parametrize("make", MAKE)
def test_objects_are_inputs_and_outputs(make):
    model = Body(lambda m, given: make(m.a(first(given)) * 2))
    x = torch.randn(5, 4)
    pipe = pc.compile(
        model, 2, example_args=(make(torch.randn(4, 4)),), n_microbatches=1, cost="analytic", partitioner="dp"
    )
    for call in (trace(model, make(torch.randn(4, 4))), pipe):
        made = call(make(x))
        assert look(made) == look(model(make(x)))
        assert torch.equal(first(made), first(model(make(x))))
        first(made).sum().backward()
    assert model.a.weight.grad is not None


def test_methods_work_on_inputs_and_between_stages():
    class Scaled(Result):
        def doubled(self) -> Any:
            return self.x * 2

    model, x = Body(lambda m, given: Scaled(m.a(given.doubled())).doubled() + len(given.note)), torch.randn(3, 4)
    assert torch.equal(trace(model, Scaled(torch.ones(2, 4)))(Scaled(x)), model(Scaled(x)))


def cache(size: int) -> DynamicCache:
    made = DynamicCache()
    for layer in range(2):
        made.update(torch.randn(size, 2, 3, 4), torch.randn(size, 2, 3, 4), layer)
    return made


def attend(m, x, past):
    keys, _ = past.update(m.a(x), m.b(x), 0)
    _, values = past.update(m.a(x), m.b(x), 1)
    return Output(logits=keys.sum(2) + values.sum(2), past=past)


def test_caches_of_transformers_are_inputs_and_outputs():
    model, x = Body(attend), torch.randn(6, 2, 1, 4)
    pipe = pc.compile(model, 2, example_args=(x, cache(6)), n_microbatches=2, cost="analytic", partitioner="dp")
    with torch.no_grad():
        torch.manual_seed(3)
        expected = model(x, cache(6))
        torch.manual_seed(3)
        made = pipe(x, cache(6))
    assert torch.equal(made.logits, expected.logits)
    assert made.past.get_seq_length() == expected.past.get_seq_length() == 4
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(made.past.layers, expected.past.layers, strict=True))


def test_constants_come_out_as_they_are():
    given = {"mode": Mode.FAST, "kind": torch.float32, "make": Result}
    model, x = Body(lambda m, x: (m.a(x), given, x.shape, x.shape[0] / 2, m.b)), torch.randn(5, 4)
    pipe = pc.compile(model, 1, example_args=(torch.randn(4, 4),), n_microbatches=1, cost="analytic")
    for call in (trace(model, torch.randn(4, 4)), pipe):
        assert call(x)[1:] == (given, (5, 4), 2.5, model.b)


@pytest.mark.parametrize("make", [lambda x: (row for row in [x]), lambda x: lambda: x, lambda x: iter([x])])
def test_an_object_that_hides_tensors_is_refused(make):
    with pytest.raises(TraceError, match="PC105"):
        trace(Body(lambda m, x: make(m.a(x))), torch.randn(3, 4))


@dataclass
class Holder:
    rows: torch.Tensor
    sizes: list[Any]


def test_flattening_and_unflattening_give_an_equal_object():
    a, b = torch.zeros(2), torch.ones(3)
    value = {"pair": Point(a, [1, None]), "more": (Result(Holder(b, [(4, 5)])), Named(x=2.5)), "text": "t"}
    leaves, form = flatten_containers(value)
    assert [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)] == [id(a), id(b)]
    again = pytree.tree_unflatten(leaves, form)
    assert (again["pair"].x is a, again["pair"].y) == (True, [1, None])
    assert type(again["more"][0]) is Result
    assert again["more"][0] is not value["more"][0]
    assert (again["more"][0].x.rows is b, again["more"][0].x.sizes) == (True, [(4, 5)])
    assert flatten_containers(again)[1] == form


def test_specs_differ_if_the_structure_does():
    one = flatten_containers([Result(Holder(torch.zeros(1), [1]))])[1]
    assert one == flatten_containers([Result(Holder(torch.ones(7), [1]))])[1]
    assert one != flatten_containers([Result(Holder(torch.zeros(1), [1, 2]))])[1]
    assert one != flatten_containers([Holder(torch.zeros(1), [1])])[1]


def test_an_object_without_tensors_is_a_leaf():
    round_and_round = Result(None)
    round_and_round.x = round_and_round
    for value in (3, "x", torch.nn.Linear(1, 1), torch.zeros(1), Result, len, round_and_round, torch.float32):
        assert shell_of(value) is None
        assert flatten_containers(value)[0] == [value]


def test_a_container_that_holds_itself_is_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(pc.PipecompileError, match="cannot be taken apart into tensors\n  why    it holds itself"):
        flatten_containers({"x": itself})


@pytest.mark.parametrize("kind", [set, frozenset, type("Own", (frozenset,), {})])
def test_a_set_of_tensors_is_taken_apart(kind: Any) -> None:
    a, b = torch.zeros(2), torch.ones(3)
    leaves, form = flatten_containers([kind((a, b)), kind((1, 2))])
    assert {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} == {id(a), id(b)}
    again, numbers = pytree.tree_unflatten(leaves, form)
    assert (type(again), numbers) == (kind, kind((1, 2)))
    assert {id(one) for one in again} == {id(a), id(b)}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: (row for row in [x]), "a generator"),
        (lambda x: map(abs, [x]), "a map"),
        (lambda x: iter([1]), "a list_iterator"),
        (lambda x: {"a": x}.values(), "a dict_values"),
        (lambda x: types.MappingProxyType({"a": x}), "a mappingproxy"),
    ],
)
def test_what_is_read_once_and_views_of_tensors_are_refused_by_name(make: Any, told: str) -> None:
    x = torch.zeros(4)
    with pytest.raises(pc.InputError, match=f"y is {told}"):
        check_rereadable([x, make(x)], lambda: ["x", "y"])
    check_rereadable([x, 3, "text", {"a": 1}.keys(), range(3), None], list)


def test_tensors_in_containers_and_objects_move_and_other_values_stay() -> None:
    moved = on_device({"a": [torch.ones(2), 3], "b": None, "c": Result(torch.ones(2))}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1:] == [3]
    assert moved["b"] is None
    assert moved["c"].x.is_meta
    assert moved["c"].note == "n"

"""Objects that a forward makes for its hooks are others for each micro-batch; those from before the call are one for all."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.emit.call_objects import CallObjects, KnownObjects, UndecidedObjects, remade, with_objects
from tests.support.eager import accumulate, assert_same


class Hooked(nn.Module):
    """Has two hooks, of which the first to run leaves something for the second."""

    def __init__(self, hooks: Callable[[Any, torch.Tensor], tuple[Any, Any]]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.hooks, self.own = hooks, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).tanh()
        k = self.b(h).tanh()
        leave, read = self.hooks(self, h)
        k.register_hook(leave)
        h.register_hook(read)
        return self.c(k)


def of_list(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    seen: list[torch.Tensor] = []
    return lambda g: seen.append(g.norm()), lambda g: g * (seen[0] + len(seen))


def of_subclass(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    """pytree takes a Counter for a leaf."""
    counts = Counter[str]()
    return lambda g: counts.update(n=1), lambda g: g * (2 + counts["n"])


def of_nested(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    table = {"norms": [deque()], "counts": defaultdict(int)}
    inner = table["norms"]

    def leave(g: torch.Tensor) -> None:
        inner[0].append(g.norm())
        table["counts"]["n"] += 1

    return leave, lambda g: g * table["norms"][0].pop() * table["counts"]["n"]


def of_variable(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    last, count = None, 0

    def leave(g: torch.Tensor) -> torch.Tensor:
        nonlocal last, count
        last, count = g.norm(), count + 1
        return g * count

    return leave, lambda g: g * last


def of_tensor(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    total = torch.zeros(())
    return lambda g: total.add_(g.norm()) and None, lambda g: g * total


def of_tensors(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    held = [h.detach().abs().mean(1, keepdim=True)]
    return lambda g: held.append(g.norm()), lambda g: g * held[0] * held[1]


class Notes:
    def __init__(self, h: torch.Tensor) -> None:
        self.scale, self.norm = h.detach(), None

    def leave(self, g: torch.Tensor) -> None:
        self.norm = g.norm()

    def __call__(self, g: torch.Tensor) -> torch.Tensor:
        return g * self.norm * self.scale


def of_object(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    notes = Notes(h)
    return notes.leave, notes


def leave_in(seen: set[float], g: torch.Tensor) -> None:
    seen.add(float(g.norm()))


class Through(torch.autograd.Function):
    """Is the identity; its backward calls a function, or appends to a list that another one reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: Any) -> torch.Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        if callable(ctx.kept):
            return ctx.kept(g), None
        ctx.kept.append(g.norm())
        return g * ctx.kept[0] * len(ctx.kept), None


class WithFunctions(Hooked):
    """Has autograd functions in the place of hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        h = Through.apply(self.a(x).tanh(), lambda g: g * len(seen))
        return self.c(Through.apply(self.b(h).tanh(), seen))


class Leaving(Hooked):
    """Leaves an activation beside what it makes for its hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.left = output.detach()
        return output


def of_partial(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    seen: set[float] = set()
    return partial(leave_in, seen), partial(lambda seen, g: g * sum(seen) * len(seen), seen)


def of_one(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
    seen: list[int] = []

    def both(g: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return g * len(seen)

    return both, both


KINDS = (of_list, of_subclass, of_nested, of_variable, of_tensor, of_tensors, of_object, of_partial)
CASES: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    *((kind, {"checkpoint": "always"}) for kind in (of_variable, of_tensor)),
    (of_nested, {"schedule": "zb-h1", "dispatch": "threads"}),
    (of_object, {"schedule": "1f1b", "check": True}),
    (of_one, {"check": True}),
]


@pytest.mark.parametrize(("hooks", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_each_micro_batch_has_objects_of_its_own(hooks: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Hooked(hooks)
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, n_microbatches=3, loss_fn=nn.functional.mse_loss, cost="analytic", **({"check": False} | options)
    )
    for _ in range(2):
        x, target = torch.randn(7, 4), torch.randn(7, 2)
        pipe.step(x, target=target)
        accumulate(eager, x, 3, nn.functional.mse_loss, target)
    assert_same(model, eager, 0)


@pytest.mark.parametrize("kind", [WithFunctions, Leaving])
def test_autograd_functions_and_models_that_leave_values_have_objects_per_micro_batch(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(of_list)
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=3, loss_fn=nn.functional.mse_loss, cost="analytic", check=False)
    x, target = torch.randn(7, 4), torch.randn(7, 2)
    pipe.step(x, target=target)
    accumulate(eager, x, 3, nn.functional.mse_loss, target)
    assert_same(model, eager, 0)


def test_an_autograd_function_that_forward_defines_or_whose_forward_fills_a_list_is_refused() -> None:
    class Defining(Hooked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen: list[int] = []

            class Local(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                    return x.view_as(x)

                @staticmethod
                def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
                    seen.append(1)
                    return g * len(seen)

            return self.c(Local.apply(x))

    class Fills(Through):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, kept: Any) -> torch.Tensor:
            kept.append(1)
            return x.view_as(x)

    class Filling(Hooked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(Fills.apply(x, []))

    for kind, message in (
        (Defining, "Local is defined in forward"),
        (Filling, "the forward of Fills changes an object"),
    ):
        with pytest.raises(pc.TraceError, match=message):
            pc.trace(kind(of_list), torch.randn(2, 4))


def test_a_list_with_tensors_that_a_hook_and_an_autograd_function_hold_is_refused_at_the_line_of_the_function() -> None:
    """Each had a list of its own per micro-batch."""

    class Sharing(Hooked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            seen = [h.detach()]
            h.register_hook(lambda g: g * len(seen))
            return self.c(Through.apply(h, seen))  # this line

    with pytest.raises(pc.TraceError, match="an autograd function gets an object with tensors of the call") as raised:
        pc.trace(Sharing(of_list), torch.randn(2, 4))
    assert "# this line" in str(raised.value)


def test_a_list_that_is_left_on_the_model_and_filled_by_hooks_of_the_call_is_refused() -> None:
    def left(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
        model.left = seen = list[torch.Tensor]()
        return lambda g: seen.append(g.norm()), lambda g: g * seen[0]

    with pytest.raises(pc.TraceError, match="PC114"):
        pc.trace(Hooked(left), torch.randn(2, 4))


def test_lists_from_before_the_call_stay_one() -> None:
    shared: list[float] = []

    def hooks(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
        own, here = model.own, list[float]()
        return lambda g: own.append(float(g.norm())) or here.append(1) or shared.append(len(here)), lambda g: g * len(
            here
        )

    model = Hooked(hooks)
    pipe = pc.compile(model, 2, n_microbatches=3, loss_fn=nn.functional.mse_loss, cost="analytic", check=False)
    pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
    assert (len(model.own), shared) == (3, [1, 1, 1])


def test_a_call_and_a_graph_by_itself_have_new_objects_each_time() -> None:
    model = Hooked(of_list)
    x = torch.randn(6, 4)
    graph, pipe = pc.trace(model, x), pc.compile(model, 2, n_microbatches=2, cost="analytic", check=False)
    for run in (graph, graph, pipe, pipe):
        run(x).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_tensor_that_is_put_into_a_list_behind_the_hook_is_refused_at_the_line_of_the_hook() -> None:
    class Late(Hooked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen: list[torch.Tensor] = []
            h = self.a(x)
            h.register_hook(lambda g: g * seen[0])  # this line
            seen.append(h.detach())
            return self.c(h)

    with pytest.raises(pc.TraceError, match="puts a tensor after this line") as raised:
        pc.trace(Late(of_list), torch.randn(2, 4))
    assert "# this line" in str(raised.value)


def test_what_cannot_be_copied_is_shared_with_a_warning_and_nodes_of_autograd_are_refused() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    def of_generator(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
        count = numbers()
        return lambda g: g * next(count), lambda g: g

    def of_node(model: Any, h: torch.Tensor) -> tuple[Any, Any]:
        node = h.grad_fn
        return lambda g: print(node), lambda g: g

    with pytest.warns(pc.RecordingWarning, match="share a generator"):
        pc.trace(Hooked(of_generator), torch.randn(2, 4))
    with pytest.raises(pc.TraceError, match="holds a node of autograd"):
        pc.trace(Hooked(of_node), torch.randn(2, 4))


def test_a_second_recording_decides() -> None:
    def made() -> Any:
        seen: list[int] = []
        return lambda: seen.append(1) or seen

    first, hook = CallObjects(None), made()
    assert first.leaves_around(hook) is None
    with pytest.raises(UndecidedObjects) as raised:
        first.check()
    second = CallObjects(raised.value.known)
    assert second.leaves_around(hook) is None
    new = made()
    assert second.leaves_around(new) == []
    held = second.note(new, [])
    second.check()
    with with_objects({}):
        assert remade(second, held, [])() == [1]
        assert remade(second, held, [])() == [1, 1]
    assert remade(second, held, [])() == remade(second, held, [])() == [1]
    assert KnownObjects().objects == {}

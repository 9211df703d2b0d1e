"""A backward in two gives what one gives, does nothing twice, runs hooks once, and frees early what it can."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipecompile.runtime.cells.divided_backward import DividedBackward, Remainder
from pipecompile.torch_private.autograd_engine import hooks_registered

WIDTH = 4
HEAVY = ("mm", "bmm", "convolution_backward", "norm", "rnn", "gelu", "softmax")
"""What must not be done twice; views and sums of the engine do not count."""


class Double(torch.autograd.Function):
    """x * w, counting its backwards."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Double.runs += 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if any(heavy in name for heavy in HEAVY):
            self.seen[name] += sum(args[-1]) if name == "convolution_backward" else 1  # gradients asked for
        return func(*args, **(kwargs or {}))


Forward = Callable[[nn.Module, torch.Tensor], "torch.Tensor | Sequence[torch.Tensor]"]


class Stage(nn.Module):
    """Some modules, and a function that uses them."""

    def __init__(self, forward: Forward, **modules: nn.Module) -> None:
        super().__init__()
        self.run = (forward,)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.run[0](self, x)
        return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def eager(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor | None, Counter[str]]:
    """One backward over all outputs; the input's gradient, and what was computed."""
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    made = [value for value in model(leaf) if value.requires_grad]
    with Counting() as counting:
        torch.autograd.backward(made, [torch.full_like(value, 0.5) for value in made])
    return leaf.grad, counting.seen


def halves(
    model: nn.Module, x: torch.Tensor, divided: DividedBackward | None = None
) -> tuple[torch.Tensor | None, Counter[str], Counter[str], Remainder]:
    """The same as I and W; what either computed, and what was left in between."""
    divided = divided or DividedBackward()
    divided.least = 0
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    before = hooks_registered()
    made = [value for value in model(leaf) if value.requires_grad]
    has_hooks = hooks_registered() != before
    gradients = [torch.full_like(value, 0.5) for value in made]
    edges = [get_gradient_edge(value) for value in made]
    del made
    with Counting() as inward:
        found, left = divided.input_half([leaf] * leaf.requires_grad, edges, gradients, has_hooks=has_hooks)
    del edges
    with Counting() as outward:
        divided.weight_half(left)
    return (found[0] if found else None), inward.seen, outward.seen, left


def assert_divided(model: nn.Module, x: torch.Tensor, tolerance: float = 0.0) -> tuple[Counter[str], Counter[str]]:
    """Equal to eager, and nothing heavy done more often. Returns what I and W computed."""
    model.zero_grad()
    twin = copy.deepcopy(model)
    divided = DividedBackward()
    for _ in range(2):  # the second time the division is known
        wanted, once = eager(twin, x)
        found, inward, outward, _ = halves(model, x, divided)
        assert inward + outward == once
        assert (wanted is None) == (found is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    return inward, outward


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def rows(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def test_products_of_weights_are_left_to_w() -> None:
    model = nn.Sequential(linear(), nn.GELU(), linear(), nn.LayerNorm(WIDTH), linear())
    inward, outward = assert_divided(Stage(lambda m, x: m.all(x), all=model), rows())
    assert inward == {"mm": 3, "gelu_backward": 1, "native_layer_norm_backward": 1}
    assert outward == {"mm": 3}


def test_convolutions_are_asked_for_either_gradient_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 2, 2))
    x = torch.randn(2, 3, 6, 6).requires_grad_()
    inward, outward = assert_divided(Stage(lambda m, x: m.all(x), all=model), x)
    assert inward == {"convolution_backward": 2, "native_batch_norm_backward": 1}
    assert outward == {"convolution_backward": 4}


def test_a_first_stage_leaves_everything_to_w() -> None:
    inward, outward = assert_divided(Stage(lambda m, x: m.b(m.a(x).relu()), a=linear(), b=linear()), rows(False))
    assert not inward
    assert outward == {"mm": 3}


def test_a_stage_without_weights_leaves_nothing() -> None:
    stage = Stage(lambda m, x: (x.softmax(-1), x * 2))
    _, inward, outward, left = halves(stage, rows())
    assert inward.total() == 1
    assert not outward
    assert not left.forks
    assert not left.roots
    assert_divided(stage, rows())


def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, weight).relu(), weight)


def three(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return m.b(h), h * 2, m.c(h) + h


def written(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h[:, :2].mul_(2).sum() + m.b(h)


SHARED: dict[str, Stage] = {
    "one layer, three times": Stage(lambda m, x: m.a(m.a(m.a(x).relu()).tanh()), a=linear()),
    "side by side": Stage(lambda m, x: m.a(x) * m.a(x.tanh()), a=linear()),
    "a weight read by a function, too": Stage(lambda m, x: m.b(m.a(x).relu()) @ m.a.weight, a=linear(), b=linear()),
    "in a product and in a norm": Stage(lambda m, x: F.layer_norm(m.a(x), (WIDTH,), m.a.bias), a=linear()),
    "a weight made once for two": Stage(lambda m, x: twice(x, m.a.weight.tanh()), a=linear()),
    "an output that no input reaches": Stage(lambda m, x: (m.a(x), m.a.weight.square().sum()), a=linear()),
}


@pytest.mark.parametrize("name", SHARED)
def test_weights_used_several_times(name: str) -> None:
    assert_divided(SHARED[name], rows(), 1e-6)


OTHERS: dict[str, tuple[Stage, bool]] = {
    "several outputs and consumers": (Stage(lambda m, x: three(m, m.a(x).relu()), a=linear(), b=linear(), c=linear()), True),
    "an output that is the input": (Stage(lambda m, x: (x, m.a(x)), a=linear()), True),
    "an output without gradient": (Stage(lambda m, x: (m.a(x), m.a(x).detach()), a=linear()), True),
    "views and writes in place": (
        Stage(lambda m, x: written(m, m.a(x).clone()), a=linear(), b=linear()),
        True,
    ),
    "in place on an output": (Stage(lambda m, x: m.b(m.a(x).relu_()).tanh_(), a=linear(), b=linear()), True),
    "weights made from others": (
        Stage(lambda m, x: m.b(m.a(x)), a=nn.utils.parametrizations.weight_norm(linear()), b=linear()),
        True,
    ),
    "attention": (
        Stage(lambda m, x: m.a(x[None], x[None], x[None])[0], a=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
        True,
    ),
    "recurrent": (Stage(lambda m, x: m.b(m.a(x)[0]), a=nn.LSTM(WIDTH, WIDTH), b=linear()), True),
    "two weights, one product": (Stage(lambda m, x: m.a(x, x), a=nn.Bilinear(WIDTH, WIDTH, WIDTH)), True),
    "embedding": (Stage(lambda m, x: m.b(m.a(x.argmax(-1))), a=nn.Embedding(WIDTH, WIDTH), b=linear()), False),
    "batches of products": (
        Stage(lambda m, x: x[None] @ m.a.weight.expand(3, WIDTH, WIDTH).contiguous(), a=linear()), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_all_kinds_of_graphs(name: str) -> None:
    stage, wants_gradient = OTHERS[name]
    assert_divided(stage, rows(wants_gradient), 1e-6)


def test_frozen_weights_and_adapters() -> None:
    stage = Stage(lambda m, x: m.a(x) + m.up(m.down(x)), a=linear(), down=nn.Linear(WIDTH, 2), up=nn.Linear(2, WIDTH))
    stage.a.requires_grad_(False)
    inward, outward = assert_divided(stage, rows())
    assert (inward["mm"], outward["mm"]) == (3, 2)


def test_a_custom_function_runs_once() -> None:
    stage = Stage(lambda m, x: m.b(Double.apply(m.a(x), m.a.bias)), a=nn.Linear(WIDTH, WIDTH, bias=True), b=linear())
    Double.runs = 0
    _, inward, outward, _ = halves(stage, rows())
    assert Double.runs == 1
    assert (inward["mm"], outward["mm"]) == (3, 1), "the weight of `a` is in the function, too"
    assert_divided(stage, rows(), 1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_region_is_recomputed_once(use_reentrant: bool) -> None:
    runs = []

    def block(m: Stage, x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return m.b(m.a(x).relu())

    stage = Stage(
        lambda m, x: m.c(checkpoint(block, m, m.d(x), use_reentrant=use_reentrant)),  # type: ignore[no-any-return]
        a=linear(), b=linear(), c=linear(), d=linear(),
    )  # fmt: skip
    halves(stage, rows())
    assert len(runs) == 2
    assert_divided(stage, rows(), 1e-6)


def test_what_others_packed_is_unpacked_once() -> None:
    unpacked = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(1)
        return tensor

    def forward(m: Stage, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            h = m.b(m.a(x).relu())
        return m.c(h)

    stage = Stage(forward, a=linear(), b=linear(), c=linear())
    _, _, outward, _ = halves(stage, rows())
    assert outward["mm"] == 1
    assert len(unpacked) == 2 + 1 + 2, "the inputs and weights of two layers, and relu's result"
    assert_divided(stage, rows())


def test_hooks_run_as_often_as_in_eager() -> None:
    def count(stage: Stage) -> Counter[str]:
        calls: Counter[str] = Counter()

        def noted(name: str) -> Callable[[Any], None]:
            return lambda _: calls.update([name])

        def forward(m: Stage, x: torch.Tensor) -> torch.Tensor:
            h = m.a(x)
            h.register_hook(noted("value"))
            return m.norm(m.b(h))

        stage.run = (forward,)
        stage.a.weight.register_hook(noted("weight"))
        stage.b.bias.register_post_accumulate_grad_hook(noted("bias"))
        stage.norm.weight.register_hook(noted("early"))
        return calls

    mine = Stage(lambda m, x: x, a=linear(), b=linear(), norm=nn.LayerNorm(WIDTH))
    theirs = copy.deepcopy(mine)
    counts, wanted = count(mine), count(theirs)
    eager(theirs, rows())
    halves(mine, rows())
    assert counts == wanted == {"value": 1, "weight": 1, "bias": 1, "early": 1}


def test_hooks_of_weights_leave_the_division() -> None:
    stage, calls = Stage(lambda m, x: m.b(m.a(x)), a=linear(), b=linear()), []
    stage.a.weight.register_hook(calls.append)
    _, _, outward, _ = halves(stage, rows())
    assert outward["mm"] == 2
    assert len(calls) == 1


def test_backward_hooks_of_modules() -> None:
    calls: list[int] = []
    stage = Stage(lambda m, x: m.b(m.a(x)), a=linear(), b=linear())
    stage.a.register_full_backward_hook(lambda *_: calls.append(1))
    halves(stage, rows())
    assert len(calls) == 1


def test_what_only_i_needs_is_freed_by_i() -> None:
    stage = Stage(lambda m, x: m.b(F.gelu(m.a(x))).sigmoid(), a=linear(), b=linear())
    divided = DividedBackward()
    divided.least = 0
    leaf = rows()
    made = stage(leaf)
    edges = [get_gradient_edge(made[0])]
    ledger = Ledger()
    held = ledger.storages(made[0].grad_fn)
    del made
    assert ledger.alive(held) == held.keys()
    _, left = divided.input_half([leaf], edges, [torch.ones(6, WIDTH)], has_hooks=False)
    del edges
    gc.collect()
    assert ledger.alive(held) == {"AddmmBackward0.mat1"}, "of gelu and sigmoid nothing is left"
    divided.weight_half(left)
    del left
    assert not ledger.alive(held)


class Ledger:
    """Which of the tensors that a graph saved are still alive."""

    def storages(self, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while node is not None:
            for name in dir(node):
                data = getattr(getattr(node, name), "data", None) if name.startswith("_raw_saved") else None
                if isinstance(data, torch.Tensor) and not data.is_leaf and name != "_raw_saved_mat2":  # a weight
                    found[f"{node.name()}.{name.removeprefix('_raw_saved_')}"] = weakref.ref(data)
            node = node.next_functions[-2 if "Addmm" in node.name() else 0][0] if node.next_functions else None
        return found

    @staticmethod
    def alive(found: dict[str, Any]) -> set[str]:
        return {name for name, trace in found.items() if trace() is not None}


def test_a_tensor_written_in_place_meanwhile_is_noticed() -> None:
    written: list[torch.Tensor] = []

    def forward(m: Stage, x: torch.Tensor) -> torch.Tensor:
        written.append(m.a(x).sigmoid())
        return m.b(written[-1])

    stage = Stage(forward, a=linear(), b=linear())
    leaf = rows()
    (made,) = stage(leaf)
    divided = DividedBackward()
    divided.least = 0
    with torch.no_grad():
        written[-1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        divided.input_half([leaf], [get_gradient_edge(made)], [torch.ones(6, WIDTH)], has_hooks=False)


def test_small_weights_are_not_worth_a_second_way() -> None:
    stage = Stage(lambda m, x: m.b(m.a(x)), a=linear(), b=linear())
    leaf = rows()
    (made,) = stage(leaf)
    _, left = DividedBackward().input_half([leaf], [get_gradient_edge(made)], [torch.ones(6, WIDTH)], has_hooks=False)
    assert not left.forks
    assert stage.a.weight.grad is not None


STEPS = ("linear", "shared", "frozen", "relu", "relu_", "norm", "add", "mul", "product", "function", "view", "made")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
       st.booleans(), st.integers(1, 3))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_random_graphs(steps: list[tuple[str, int, int]], wants_gradient: bool, outputs: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(linear() for _ in steps).double()
    shared, norm = linear().double(), nn.LayerNorm(WIDTH).double()

    def forward(m: Stage, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x]
        for layer, (step, i, j) in zip(m.layers, steps, strict=True):
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(_applied(step, a, b, layer, m.shared, m.norm))
        return tuple(values[-outputs:])

    stage = Stage(forward, layers=layers, shared=shared, norm=norm)
    if any(value.requires_grad for value in stage(rows(wants_gradient).double())):
        assert_divided(stage, rows().detach().double().requires_grad_(wants_gradient), 1e-9)


def _applied(
    step: str, a: torch.Tensor, b: torch.Tensor, layer: nn.Module, shared: nn.Module, norm: nn.Module
) -> torch.Tensor:
    made: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: layer(a),
        "shared": lambda: shared(a),
        "frozen": lambda: F.linear(a, layer.weight.detach()),
        "relu": a.relu,
        "relu_": lambda: layer(a).relu_(),
        "norm": lambda: norm(a),
        "add": lambda: a + b,
        "mul": lambda: a * b,
        "product": lambda: (a @ b.t()).softmax(-1) @ b,
        "function": lambda: Double.apply(a, layer.bias),
        "view": lambda: a.view(3, 2, WIDTH).transpose(0, 1).reshape(6, WIDTH),
        "made": lambda: F.linear(a, shared.weight.tanh() * layer.weight),
    }
    return made[step]()

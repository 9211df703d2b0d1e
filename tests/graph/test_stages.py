from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.stages import routes
from pipecompile.ir import HOST, Route
from pipecompile.tracing import trace
from pipecompile.tracing.node_facts import facts
from tests.support.cuts import cut, run_stages, stages_of
from tests.support.eager import accumulate, assert_same, square_loss
from tests.support.models import UNet


class Attention(nn.Module):
    """Sizes from the batch, views, an in-place sum, a mask for all, a constant and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale = torch.tensor(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        size, length, _ = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-1, -2) * self.scale + mask).softmax(-1)
        y = self.out((weights @ v).transpose(1, 2).reshape(size, length, 8))
        y += x
        y = self.norm(y.flatten(0, 1)).reshape(size, length, 8) + torch.arange(size)[:, None, None]
        return {"y": torch.relu_(y), "weights": weights, "size": size}


class Twice(nn.Module):
    """One BatchNorm used twice, a ReLU in place after it, and a skip over both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.relu, self.b = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Linear(4, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(self.relu(self.norm(self.relu(self.norm(h))))) * h


MODELS = {
    "attention": (Attention, lambda n: (torch.randn(n, 3, 8), torch.zeros(n, 1, 3, 3))),
    "twice": (Twice, lambda n: (torch.randn(n, 4),)),
    "unet": (UNet, lambda n: (torch.randn(n, 3, 16, 16),)),
}
TRACED = {name: trace(make(), *inputs(4)) for name, (make, inputs) in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_stages_one_after_the_other_are_the_model(name, data):
    graph = TRACED[name]
    bounds = data.draw(st.lists(st.integers(0, len(compute_nodes(graph))), min_size=1, max_size=4).map(sorted))
    size = data.draw(st.sampled_from([2, 5]))
    make, inputs = MODELS[name]
    model = make()
    model.load_state_dict(_states[name])
    args = inputs(size)
    graph.load_state_dict(_graph_states[name])
    made = run_stages(graph, cut(graph, bounds), size, *args)
    expected = model(*args)
    _assert_same(made, expected)
    buffers = dict(model.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in graph.named_buffers() if key in buffers)
    found = torch.autograd.grad(_loss(made), [graph.get_parameter(n) for n, _ in model.named_parameters()])
    wanted = torch.autograd.grad(_loss(expected), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


_graph_states = {name: {k: v.clone() for k, v in graph.state_dict().items()} for name, graph in TRACED.items()}
_states = {name: {k: v for k, v in state.items() if "_constant" not in k} for name, state in _graph_states.items()}


def _loss(made):
    return made.square().sum() if isinstance(made, torch.Tensor) else made["y"].square().sum()


def _assert_same(made, expected):
    if isinstance(made, torch.Tensor):
        assert torch.equal(made, expected)
    else:
        assert made.keys() == expected.keys()
        assert all(
            made[key] == expected[key] if key == "size" else torch.equal(made[key], expected[key]) for key in made
        )


class Skip(nn.Module):
    """
    x ─► a ─► b ─► c ─► d ─► out
         └────────►┴───►┘
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, count: int, index: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        c = self.c(self.b(a) + a)
        return self.d(c + a) * count + index


def test_a_value_goes_straight_from_its_producer_to_all_its_consumers():
    graph = trace(Skip(), torch.randn(6, 4), 2, torch.arange(6)[:, None])
    order = [node.name for node in compute_nodes(graph)]
    assert order == ["a", "b", "add", "c", "add_1", "d", "mul", "add_2"]
    ways, stages = stages_of(graph, dict(zip(order, [0, 1, 1, 1, 2, 2, 2, 3], strict=True)))
    assert ways == (
        Route("x", HOST, (0,), 96.0, gradient=False),
        Route("index", HOST, (3,), 48.0, gradient=False),
        Route("a", 0, (1, 2), 96.0, gradient=True),
        Route("c", 1, (2,), 96.0, gradient=True),
        Route("mul", 2, (3,), 96.0, gradient=True),
        Route("add_2", 3, (HOST,), 96.0, gradient=True),
    )
    assert [(stage.inputs, stage.outputs) for stage in stages] == [
        (("x",), ("a",)), (("a",), ("c",)), (("a", "c"), ("mul",)), (("index", "mul"), ("add_2",)),
    ]  # fmt: skip
    assert not any(stage.sized for stage in stages)


def test_bytes_are_those_of_one_micro_batch():
    graph = trace(nn.Sequential(nn.Linear(4, 8)), torch.randn(6, 4))
    from pipecompile.graph.stages import routes

    assert [way.nbytes for way in routes(graph, {"_0": 0}, 3)] == [48.0, 96.0]
    assert [way.nbytes for way in routes(graph, {"_0": 0})] == [96.0, 192.0]


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_the_bytes_of_a_pipeline_are_those_of_one_micro_batch(samples):
    """A single sample is recorded like more of them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    pipe = pc.compile(model, 2, example_args=(torch.randn(2 * samples, 4),), n_microbatches=2, cost="analytic")
    bytes_of = [samples * width * 4.0 for width in (4, 8, 4)]
    assert [way.nbytes for way in pipe.plan.routes] == [way.nbytes for way in pipe._cache.latest.routes] == bytes_of


def test_sizes_are_not_routed():
    graph = TRACED["attention"]
    ways, stages = stages_of(graph, cut(graph, [len(compute_nodes(graph)) // 2]))
    scalars = {node.name for node in graph.graph.nodes if facts(node).is_size}
    assert scalars
    assert scalars.isdisjoint(way.value for way in ways)
    assert all(stage.sized and "batch_size" in _placeholders(stage.module) for stage in stages)


def _placeholders(module) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]


def test_parameters_of_a_stage_are_the_models_own():
    model = Skip()
    graph = trace(model, torch.randn(6, 4), 2, torch.arange(6)[:, None])
    _, stages = stages_of(graph, cut(graph, [2]))
    assert stages[0].module.get_submodule("a") is model.a
    assert stages[1].module.get_submodule("c") is model.c


def test_a_stage_may_be_empty():
    graph = trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    _, stages = stages_of(graph, {"_0": 1})
    assert stages[0].nodes == stages[0].inputs == stages[0].outputs == ()
    assert stages[0].module() == ()


def test_the_traced_graph_is_left_as_it_is():
    graph = TRACED["twice"]
    before = str(graph.graph)
    stages_of(graph, cut(graph, [2]))
    assert str(graph.graph) == before


def test_bytes_of_a_value_with_one_number_per_sample_are_those_of_the_size_asked_for() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), nn.ReLU()), torch.randn(6, 4))
    stage_of = {node.name: index for index, node in enumerate(compute_nodes(graph))}
    assert [route.nbytes for route in routes(graph, stage_of, samples=2) if route.value == "_1"] == [2 * 4]


class Masked(nn.Module):
    """A mask and positions made of the input, a buffer of zeros that is filled, and layers in two halves."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x.dtype) * 2.0
        scale = self.scale * 2.0
        filled = torch.zeros_like(x)
        h = self.first(x)
        filled.copy_(h)
        return self.second(h) * mask * scale + filled


def gradients_of_routes(*, x_requires_grad: bool = False, frozen: bool = False) -> set[str]:
    """Return the values between the halves whose gradient is returned."""
    model, x = Masked(), torch.randn(6, 4, requires_grad=x_requires_grad)
    model.first.requires_grad_(not frozen)
    graph = trace(model, x)
    names = [node.name for node in compute_nodes(graph)]
    stage_of = {name: int(place >= names.index("second")) for place, name in enumerate(names)}
    return {route.value for route in routes(graph, stage_of) if route.gradient and 1 in route.consumers}


def test_no_gradient_is_returned_of_what_no_weight_goes_into() -> None:
    """The mask (mul) has none unless the input has. What is written in place, and what buffers and modules go into, keeps its own."""
    assert gradients_of_routes() == {"first", "copy", "mul_1"}
    assert gradients_of_routes(x_requires_grad=True) == {"first", "copy", "mul_1", "mul"}
    assert gradients_of_routes(frozen=True) == {"first", "copy", "mul_1"}  # a module counts, whatever its weights


def test_a_recording_without_gradients_says_nothing_of_them() -> None:
    model, x = Masked(), torch.randn(6, 4)
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=square_loss, cost="analytic", split_before=["second"])
    with torch.no_grad():
        pipe(x)
    pipe.step(x)
    pipe.zero_grad()
    reference = copy.deepcopy(model)
    pipe.step(x)
    accumulate(reference, x, 2)
    assert_same(model, reference, tolerance=1e-6)
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    reference = copy.deepcopy(model)
    leaf = torch.randn(6, 4, requires_grad=True)
    other = leaf.detach().requires_grad_()
    pipe.step(leaf)
    accumulate(reference, other, 2)
    assert torch.allclose(leaf.grad, other.grad)

"""Statements that decide on values or draws are nodes of their own: pipelines compute what the loop over micro-batches does."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.tracing.outlining.code_blocks import blocks_around
from pipecompile.tracing.outlining.outlined_calls import UnsuitableBlock, code_outlined


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.norm(self.a(x)).relu())


class Encoder(nn.Module):
    """Layers and a head; `body` is the forward."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(6, 2)
        self.drop, self.body = 0.5, body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def drops_by_item(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        if not (m.training and torch.rand(1).item() <= m.drop):
            x = layer(x)
    return m.head(x)


def drops_with_states(m: Any, x: torch.Tensor) -> torch.Tensor:
    states: tuple[Any, ...] = ()
    for layer in m.layers:
        states = (*states, x)
        skip = m.training and torch.rand([]) < m.drop
        if not skip:
            out = (layer(x), None)
            x = out[0]
        if skip:
            out = (None, None)
    return m.head(x + states[-1])


def drops_by_continue(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        if m.training:
            chance = random.random()
            if chance < m.drop:
                continue
        x = layer(x)
    return m.head(x)


def collects(m: Any, x: torch.Tensor) -> torch.Tensor:
    seen = []
    for layer in m.layers:
        if torch.rand(()) < 0.5:
            x = layer(x)
            seen.append(x)
        else:
            seen.append(x * 2)
    return m.head(torch.stack(seen).mean(0))


def decides(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        y = layer(x)
        if y.norm() > x.norm() + 0.5:
            x = y
    return m.head(x)


def returns_early(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    if x.mean() > 0:
        x = x / 2
        return m.head(x)
    return m.head(x * 2)


def logs(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    m.logged = x.mean().item()
    return m.head(x)


def through_a_function(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.head(halved(m.layers, x))


def halved(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
        while x.abs().max() > 2:
            x = x / 2
    return x


BODIES = [
    drops_by_item,
    drops_with_states,
    drops_by_continue,
    collects,
    decides,
    returns_early,
    logs,
    through_a_function,
]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def state(model: nn.Module) -> list[Any]:
    return [*(p.grad for p in model.parameters()), *model.buffers(), getattr(model, "logged", None)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("settings", [{}, {"checkpoint": "always"}], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_steps_and_calls_are_those_of_the_loop(body: Any, settings: dict[str, Any]) -> None:
    seed(0)
    model = Encoder(body)
    if body is drops_with_states:
        model = nn.Sequential(nn.Linear(6, 6), model)  # the loop is in a submodule that is most of the model
    expected, x, target = copy.deepcopy(model), torch.randn(6, 6), torch.randn(6, 2)
    pipe = pc.compile(
        model, 2, n_microbatches=2, loss_fn=F.mse_loss, cost="analytic", dispatch="inline", schedule="gpipe", **settings
    )
    for step in range(4):
        model.zero_grad()
        expected.zero_grad()
        seed(step)
        loss = pipe.step(x, target=target)
        seed(step)
        losses = []
        for part, goal in zip(x.chunk(2), target.chunk(2), strict=True):
            losses.append(F.mse_loss(expected(part), goal) / 2)
            losses[-1].backward()
        torch.testing.assert_close(loss, sum(losses).detach())
        torch.testing.assert_close(state(model), state(expected))
    if body is decides:
        with pytest.raises(pc.InputError, match="samples meet at test_outlined_calls"):
            pipe(x)
        return
    for mode in (True, False):
        seed(9)
        made = pipe.train(mode)(x)
        seed(9)
        expected.train(mode)
        torch.testing.assert_close(made, torch.cat([expected(part) for part in x.chunk(2)]))


def test_each_layer_that_may_be_dropped_is_a_node_with_its_parameters() -> None:
    seed(0)
    model = Encoder(drops_by_item)
    model.drop = 0.1
    graph = pc.trace(model, torch.randn(4, 6))
    nodes = [node for node in graph.graph.nodes if "kept" in str(node.target)]
    assert len(nodes) == 4
    for node, layer in zip(nodes, model.layers, strict=True):
        held = {id(tensor) for tensor in graph.get_submodule(str(node.target)).parameters()}
        assert held == {id(parameter) for parameter in layer.parameters()}
    pipe = pc.compile(model, 4, n_microbatches=2, example_args=(torch.randn(4, 6),), cost="analytic")
    stage_of = pipe.plan.stage_of
    assert sorted(stage_of[node.name] for node in nodes) == [0, 1, 2, 3]


def test_layers_that_no_trial_run_used_are_trained() -> None:
    model = Encoder(drops_by_item)
    model.drop = 0.97
    seed(0)
    pipe = pc.compile(model, 2, n_microbatches=1, loss_fn=F.mse_loss, cost="analytic", dispatch="inline")
    expected, x, target = copy.deepcopy(model), torch.randn(4, 6), torch.randn(4, 2)
    for step in range(40):
        seed(step)
        pipe.step(x, target=target)
        seed(step)
        F.mse_loss(expected(x), target).backward()
    assert any(parameter.grad is not None for parameter in model.layers.parameters())
    torch.testing.assert_close(state(model), state(expected))


def returns_its_argument(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.layers[0](x)
    z = m.layers[1](y) if y.sum() > 1e9 else y
    return m.head(z + y)


def test_a_result_that_was_an_argument_by_chance_is_no_argument() -> None:
    model = Encoder(returns_its_argument).eval()
    graph = pc.trace(model, torch.randn(4, 6))
    large = torch.full((4, 6), 1e10)
    assert torch.equal(graph(large), model(large))


def chooses_a_head(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layers[1](x)
    return m.head(h) if x.sum() > 0 else m.other(h) + m.bias


def test_a_block_holds_the_layers_that_it_names_on_every_way() -> None:
    model = Encoder(chooses_a_head).eval()
    model.other, model.bias = nn.Linear(6, 2), nn.Parameter(torch.ones(2))
    x, named = torch.ones(4, 6), {id(p) for p in (*model.head.parameters(), *model.other.parameters(), model.bias)}
    graph = pc.trace(model, x)
    (kept,) = [node for node in graph.graph.nodes if "kept" in str(node.target)]
    assert {id(parameter) for parameter in graph.get_submodule(str(kept.target)).parameters()} == named
    for given in (x, -x):
        assert torch.equal(graph(given), model(given))


class Listing(nn.Module):
    """A stack of layers with layer drop that lists what the layers give: as many as ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        seen = []
        for layer in self.layers:
            if torch.rand(()) > 0.3:
                x = layer(x)
                seen.append(x)
        return x, seen


def test_a_structure_that_draws_decide_is_refused_when_the_model_is_compiled() -> None:
    seed(0)
    with pytest.raises(pc.TraceError, match="has another length from run to run, and is read here") as caught:
        pc.trace(nn.Sequential(nn.Linear(6, 6), Listing()), torch.randn(4, 6))
    assert caught.value.code == "PC111"


def changes_the_kind(m: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None
    for layer in m.layers:
        if torch.rand(()) > -1:
            x, bias = layer(x), x
    return m.head(x if bias is None else x + bias)


def test_a_value_that_may_stay_none_is_not_taken_for_a_tensor() -> None:
    with pytest.raises(pc.TraceError) as caught:  # the loop would be a block, but it is the whole model
        pc.trace(Encoder(changes_the_kind), torch.randn(4, 6))
    assert (caught.value.code, caught.value.source) == ("PC101", "if torch.rand(()) > -1:")


def remembers(m: Any, x: torch.Tensor) -> torch.Tensor:
    seen: set[int] = set()
    x = m.layers[0](x)
    for value in (1, 1, 2):
        if x.sum() > 0 and value not in seen:
            seen.add(value)
            x = x / 2
    return m.head(m.layers[1](x))


def advances(m: Any, x: torch.Tensor) -> torch.Tensor:
    layers = iter(m.layers)
    x = next(layers)(x)
    if x.sum() > -1e9:
        x = next(layers)(x)
    return m.head(next(layers)(x))


@pytest.mark.parametrize("body", [remembers, advances], ids=lambda body: body.__name__)
def test_a_block_does_not_share_what_each_call_makes_for_itself(body: Any) -> None:
    with pytest.raises(pc.TraceError) as caught:
        pc.trace(Encoder(body).eval(), torch.randn(4, 6))
    assert caught.value.code == "PC101"


def test_functions_have_their_code_back_after_an_error() -> None:
    model, code = Encoder(halved), halved.__code__
    place = next(blocks_around(code, code.co_firstlineno + 3))

    def fail(_: Any) -> Any:
        raise UnsuitableBlock(place, "of a test")

    def run() -> None:
        with code_outlined(model, [place], fail):
            assert halved.__code__ is not code
            halved(model.layers, torch.ones(4, 6))

    with pytest.raises(UnsuitableBlock, match="of a test"):
        run()
    assert halved.__code__ is code


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = self.b(x)
        return self.c(x)


def test_what_a_recording_held_is_freed() -> None:
    """The code of a forward with outlined blocks held the recorder, and with it the inputs, for ever."""
    inputs = torch.randn(3, 6)
    known = weakref.ref(inputs)
    pc.trace(Branches(), inputs)
    del inputs
    gc.collect()
    assert known() is None

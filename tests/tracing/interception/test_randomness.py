"""Draws of torch are counted by the operators' tags; draws of Python are refused at their line."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from random import random as bound_before
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.interception import randomness
from pipecompile.tracing.interception.randomness import RandomDrawCounter, draws_random, rng_function
from pipecompile.tracing.node_facts import facts
from tests.support.eager import assert_same


def test_draws_are_counted() -> None:
    with RandomDrawCounter() as counter:
        torch.ones(3).exp()
        assert counter.count == 0
        torch.rand(3)
        F.dropout(torch.ones(3), 0.5)
        F.dropout(torch.ones(3), 0.5, training=False)
    assert counter.count == 2


ROWS = torch.randn(1, 2, 4, 8)
OPERATORS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "attention": (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, (ROWS, ROWS, ROWS), {}),
    "rrelu": (torch.ops.aten.rrelu_with_noise, (ROWS, torch.empty_like(ROWS)), {"training": True}),
    "rrelu, evaluation": (torch.ops.aten.rrelu_with_noise, (ROWS, torch.empty_like(ROWS)), {"training": False}),
    "native dropout": (torch.ops.aten.native_dropout, (ROWS, 0.5, True), {}),
    "native dropout, probability 0": (torch.ops.aten.native_dropout, (ROWS, 0.0, True), {}),
    "native dropout, evaluation": (torch.ops.aten.native_dropout, (ROWS, 0.5, False), {}),
    "bernoulli": (torch.ops.aten.bernoulli, (ROWS.sigmoid(),), {}),
    "bernoulli, probability 0": (torch.ops.aten.bernoulli, (ROWS, 0.0), {}),
    "normal": (torch.ops.aten.normal, (ROWS, ROWS.exp()), {}),
    "exp": (torch.ops.aten.exp, (ROWS,), {}),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_draws_if_the_state_of_the_generator_changes(name: str) -> None:
    operator, args, kwargs = OPERATORS[name]
    func = getattr(operator, {"bernoulli, probability 0": "p", "normal": "Tensor_Tensor"}.get(name, "default"))
    before = torch.get_rng_state()
    func(*args, **kwargs)
    assert draws_random(func, args, kwargs) is not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dropout_p", "draws"), [(0.0, False), (0.5, True)])
def test_attention_without_dropout_draws_nothing(dropout_p: float, draws: bool) -> None:
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    args = (ROWS, ROWS, ROWS, None, True)
    assert draws_random(func, (*args, dropout_p), {}) is draws
    assert draws_random(func, args, {"dropout_p": dropout_p}) is draws
    assert not draws_random(func, args, {})  # 0.0 by default


def test_on_fake_tensors_the_state_stays_as_it_is() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode():
        assert rng_function(torch.manual_seed)(3) is None
        state = rng_function(torch.get_rng_state)()
    assert (state.shape, state.dtype) == (before.shape, before.dtype)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_calls_the_function_itself() -> None:
    seed = rng_function(torch.manual_seed)
    assert seed.__name__ == "manual_seed"
    assert rng_function(torch.manual_seed) is seed
    seed(3)
    first = torch.rand(2)
    seed(3)
    assert torch.equal(torch.rand(2), first)


compiled = pc.compile  # imported before the generators are seeded: libraries draw while they are imported
RNG = random.Random(1)
GENERATOR = np.random.default_rng(1)


def chosen(seed: int) -> float:
    return float(np.random.default_rng(seed).random())  # a generator of its own: the same at every call


DRAWS: dict[str, Callable[[Any], float]] = {
    "random": lambda _: random.random(),
    "uniform": lambda _: random.uniform(0, 1),
    "bound before": lambda _: bound_before(),
    "shuffle": lambda _: random.sample([0.1, 0.4, 0.6, 0.9], 1)[0],
    "numpy": lambda _: float(np.random.rand()),
    "object of the model": lambda layer: layer.rng.random(),
    "object of numpy": lambda layer: float(layer.generator.random()),
    "global object": lambda _: RNG.random(),
    "global object of numpy": lambda _: float(GENERATOR.random()),
}


class Layer(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(4, 4), draw
        self.rng, self.generator = random.Random(2), np.random.default_rng(2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.draw(self) > 0.5:
            return self.inner(h)
        return h


class Net(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), Layer(draw), Layer(draw), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def fresh(draw: Callable[[Any], float]) -> nn.Module:
    """Return the model, with all generators set to their beginnings."""
    torch.manual_seed(0)
    random.seed(3)
    np.random.seed(3)
    RNG.seed(3)
    GENERATOR.bit_generator.state = np.random.default_rng(3).bit_generator.state
    return Net(draw)


def trained(model: nn.Module, step: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        step(x)
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


def looped(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> None:
        for part in x.chunk(4):
            (model(part).square().mean() / 4).backward()

    return step


@pytest.mark.smoke
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", DRAWS)
def test_each_micro_batch_draws_anew_what_the_loop_draws(kind: str) -> None:
    expected = trained(model := fresh(DRAWS[kind]), looped(model))
    model = fresh(DRAWS[kind])
    settings = {"checkpoint": "always"} if kind in ("random", "object of numpy") else {}
    pipe = compiled(model, 2, devices=["cpu"] * 2, n_microbatches=4, schedule="gpipe", cost="analytic",
                      dispatch="inline", pin={"layers.1": 0, "layers.2": 0}, loss_fn=lambda y: y.square().mean(), **settings)  # fmt: skip
    actual = trained(model, pipe.step)
    assert {reason.piece.name for reason in pipe.graph.facts.kept} == {"layers.1", "layers.2"}
    for one, two in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, two)


class Root(nn.Module):
    """A draw in the forward of the whole model, in a statement or in an expression without one."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self, x)


def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.a(x)
    x = x * RNG.random()  # the line
    return m.b(x)


def test_a_draw_in_a_statement_is_kept_whole_at_its_line() -> None:
    before = RNG.getstate()
    graph = pc.trace(model := Root(scaled), torch.ones(2, 4))
    assert RNG.getstate() == before
    assert [reason.fault.source for reason in graph.facts.kept] == ["x = x * RNG.random()  # the line"]
    first = [graph(torch.ones(2, 4)) for _ in range(2)]
    RNG.setstate(before)
    assert all(map(torch.equal, first, [model(torch.ones(2, 4)) for _ in range(2)]))
    assert not torch.equal(*first)


class Seeding(nn.Module):
    """Seeds the generator itself, as the block attention of BigBird does: all calls end in one state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.random.seed(5)
        return x[:, np.random.permutation(4)]


def test_a_model_that_seeds_the_generator_draws_although_it_ends_in_the_state_of_before() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Seeding(), Seeding()), torch.randn(2, 4)
    model(x)
    graph = pc.trace(model, x)
    assert {reason.piece.path for reason in graph.facts.kept} == {"1", "2"}
    assert [facts(node).draws for node in graph.graph.nodes if node.op == "call_module"] == [False, True, True]
    np.random.seed(1)
    model(x)
    wanted = np.random.random()
    np.random.seed(1)
    graph(x)
    assert np.random.random() == wanted


def tallied(m: Any, x: torch.Tensor) -> torch.Tensor:
    total = 0
    for i in range(200):
        total = (total + i * 2) % 7 if i != 3 else total
    x = x * RNG.random()  # the line
    return m.b(x) * total


def test_arithmetic_before_a_draw_is_not_looked_at_operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(randomness, "python_draws", lambda states: looks.append(1) or states.of_python().changed())
    graph = pc.trace(Root(tallied), torch.ones(2, 4))
    assert [reason.fault.source for reason in graph.facts.kept] == ["x = x * RNG.random()  # the line"]
    assert len(looks) < 600  # of 2,600 operations


class Rated(nn.Module):
    """Draws in a property, whose value a sum reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    @property
    def rate(self) -> float:
        return RNG.random()  # in the property

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x * self.rate  # the line
        return x + 1


def test_a_draw_of_a_property_is_found_at_its_own_line() -> None:
    before = RNG.getstate()
    graph = pc.trace(model := nn.Sequential(Rated(), nn.Linear(4, 4)), torch.ones(2, 4))
    RNG.setstate(before)
    first = graph(torch.ones(2, 4))
    RNG.setstate(before)
    assert torch.equal(first, model(torch.ones(2, 4)))
    assert [reason.fault.source for reason in graph.facts.kept] == ["return RNG.random()  # in the property"]


def test_a_draw_that_no_statement_has_is_refused_at_its_line() -> None:
    before = RNG.getstate()
    with pytest.raises(TraceError, match=r"draws from a random\.Random") as caught:
        pc.trace(Root(lambda m, x: m.b(m.a(x) * RNG.random())), torch.ones(2, 4))
    assert caught.value.code == "PC116"
    assert "RNG.random()" in caught.value.source
    assert RNG.getstate() == before


def test_a_generator_made_in_the_call_is_no_draw() -> None:
    graph = pc.trace(nn.Sequential(nn.Linear(4, 4), Layer(lambda _: chosen(0))), torch.ones(2, 4))
    assert graph.facts.kept == ()


def test_a_draw_around_the_forward_is_refused_at_the_forward() -> None:
    """Decorators that check types draw which item of a container they look at; the error had no line."""

    class Checked(nn.Linear):
        pass

    plain = Checked.forward
    space: dict[str, Any] = {"plain": plain, "random": random}
    exec("def forward(self, x):\n    random.random()\n    return plain(self, x)", space)
    space["forward"].__wrapped__ = plain
    Checked.forward = space["forward"]  # type: ignore[method-assign]
    with pytest.raises(pc.TraceError) as caught:
        pc.trace(Checked(2, 2), torch.randn(3, 2))
    assert caught.value.code == "PC116"
    assert caught.value.function == "Linear.forward"
    assert "around this function" in str(caught.value)


TORCH_RNG = torch.Generator()


class Noisy(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def made(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(x.shape[1:], generator=generator)
    return x * noise


def seeded(x: torch.Tensor) -> torch.Tensor:
    TORCH_RNG.manual_seed(3)
    noise = torch.rand(x.shape[1:], generator=TORCH_RNG)
    return x * noise


@pytest.mark.parametrize("body", [made, seeded])
def test_a_generator_that_the_forward_makes_or_seeds_draws_the_same_in_every_run(body: Any) -> None:
    """A graph went on drawing from the generator of the recording: the second micro-batch got other numbers."""
    model = nn.Sequential(nn.Linear(4, 4), Noisy(body))
    graph = pc.trace(model, torch.ones(2, 4))
    assert [reason.piece.name for reason in graph.facts.kept] == ["1"]
    for _ in range(3):
        assert torch.equal(graph(torch.ones(2, 4)), model(torch.ones(2, 4)))
    with pytest.raises(TraceError, match=r"PC116(?s:.*)the generator is (made|seeded) in the forward"):
        pc.trace(Root(lambda _, x: body(x)), torch.ones(2, 4))


def test_draws_from_a_generator_that_outlives_the_call_are_nodes() -> None:
    model = Root(lambda m, x: m.b(m.a(x) * torch.rand(4, generator=TORCH_RNG)))
    graph = pc.trace(model, torch.ones(2, 4))
    assert not graph.facts.kept
    state = TORCH_RNG.get_state()
    expected = [model(torch.ones(2, 4)) for _ in range(2)]
    TORCH_RNG.set_state(state)
    assert all(map(torch.equal, expected, [graph(torch.ones(2, 4)) for _ in range(2)]))


class Recurrent(nn.Module):
    """A recurrent layer as a module, or as the function that it calls."""

    def __init__(self, kind: str, rate: float, *, is_module: bool) -> None:
        super().__init__()
        self.layer, self.kind, self.rate, self.is_module = (
            getattr(nn, kind)(4, 4, 2, dropout=rate),
            kind,
            rate,
            is_module,
        )

    def forward(self, x):
        if self.is_module:
            return self.layer(x)[0]
        start = x.new_zeros(2, x.size(1), 4)
        function = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}[self.kind]
        state = (start, start) if self.kind == "LSTM" else start
        weights = [self.layer.get_parameter(f"{name}_l{i}") for i in (0, 1) for name in NAMES]
        return function(x, state, weights, True, 2, self.rate, self.training, False, False)[0]


NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_dropout_between_recurrent_layers_is_a_draw(kind: str, *, is_module: bool) -> None:
    def draws(rate: float, *, trains: bool = True) -> bool:
        model = Recurrent(kind, rate, is_module=is_module).train(trains)
        graph = pc.trace(model, torch.randn(3, 5, 4), batch_dims={"x": 1})
        return any(facts(node).draws for node in graph.graph.nodes)

    assert draws(0.4)
    assert not draws(0.0)
    assert not draws(0.4, trains=False)


def test_dropout_between_recurrent_layers_is_recomputed_as_in_the_loop() -> None:
    model, x, target = Recurrent("LSTM", 0.4, is_module=True), torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    eager = copy.deepcopy(model)
    options = {"batch_dims": {"x": 1, "target": 1}, "n_microbatches": 3, "cost": "analytic"}
    pipe = pc.compile(model, 1, loss_fn=F.mse_loss, checkpoint="always", **options)
    torch.manual_seed(0)
    pipe.step(x, target=target)
    torch.manual_seed(0)
    for a, b in zip(x.chunk(3, 1), target.chunk(3, 1), strict=True):
        (F.mse_loss(eager(a), b) / 3).backward()
    assert_same(model, eager, 1e-6)

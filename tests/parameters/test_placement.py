"""Tied tensors on several devices: here every stage has a memory of its own, so mirrors are used on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.parameters.placement import Homes, move_model, place_stages
from pipecompile.parameters.tied_mirrors import MirroredModule
from tests.support.compilations import specialized
from tests.support.eager import accumulate, assert_same, square_loss

WIDTH, VOCABULARY = 8, 16


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two stages share memory."""
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """Embedding and head share one weight, as GPT-2's do: two modules, one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x)))


class ByFunction(Language):
    """The tied weight is read as an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.blocks(self.embedding(x)), self.embedding.weight)


class Repeated(nn.Module):
    """The same block, called again and again, as ALBERT does: every stage needs every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """One recurrent layer used twice: its weights are also kept in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.between, self.head = Block(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(self.lstm(self.embedding(x))[0])
        return self.head(self.between(self.lstm(x)[0]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two modules": Language,
    "module and attribute": ByFunction,
    "one module, many uses": Repeated,
    "recurrent": Recurrent,
}
STAGES = {"two modules": 4, "module and attribute": 4, "one module, many uses": 4, "recurrent": 3}


def next_token(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> torch.Tensor:
    return torch.randint(VOCABULARY, (6, 5))


def piped(model: nn.Module, n_stages: int = 4, **options: Any) -> pc.Pipeline:
    return pc.compile(model, n_stages, n_microbatches=3, devices=["cpu"] * n_stages, cost="analytic", **options)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_eager_training(name: str, dispatch: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    eager, keys = copy.deepcopy(model), list(model.state_dict())
    pipe = piped(model, STAGES[name], loss_fn=next_token, dispatch=dispatch)
    mine, theirs = torch.optim.AdamW(pipe.parameters(), 1e-2), torch.optim.AdamW(eager.parameters(), 1e-2)
    for _ in range(5):
        x = batch()
        mine.zero_grad()
        theirs.zero_grad()
        loss = pipe.step(x, target=x.roll(-1, 1))
        expected = accumulate(eager, x, 3, next_token, x.roll(-1, 1))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert_same(model, eager, 1e-11)
        mine.step()
        theirs.step()
    assert pipe._cache.latest.mirrors.mirrors, "this test needs weights on several devices"
    assert pipe._cache.latest.number == 1, "a recurrent layer noted its mirrors, and was recorded anew in every step"
    assert list(pipe.state_dict()) == keys
    assert len(list(pipe.parameters())) == len(list(eager.parameters())), "tied weights are one parameter"


@pytest.mark.usefixtures("apart")
def test_two_forwards_before_their_backwards() -> None:
    model = Language().double()
    eager, a, b = copy.deepcopy(model), batch(), batch()
    pipe = piped(model)
    first, second = pipe(a), pipe(b)
    square_loss(second).backward()
    square_loss(first).backward()
    for x in (a, b):
        square_loss(eager(x)).backward()
    assert_same(model, eager, 1e-11)


@pytest.mark.usefixtures("apart")
def test_writes_that_leave_no_trace_are_seen() -> None:
    model, x = Language(), batch()
    pipe = piped(model).eval()
    with torch.no_grad():
        pipe(x)
        model.embedding.weight.data.mul_(2)
        torch.testing.assert_close(pipe(x), torch.cat([model(part) for part in x.tensor_split(3)]), rtol=0, atol=0)
        with torch.inference_mode():
            model.embedding.weight.data.mul_(2)
            torch.testing.assert_close(pipe(x), torch.cat([model(part) for part in x.tensor_split(3)]), rtol=0, atol=0)


@pytest.mark.usefixtures("apart")
def test_what_was_frozen_or_changed_its_dtype_meanwhile() -> None:
    model, x = Language(), batch()
    pipe = piped(model)
    square_loss(pipe(x)).backward()
    model.zero_grad()
    model.embedding.weight.requires_grad_(False)
    square_loss(pipe(x)).backward()
    assert model.embedding.weight.grad is None
    assert model.blocks[0].up.weight.grad is not None
    pipe.double()
    assert pipe(x).dtype == torch.float64


@pytest.mark.usefixtures("apart")
def test_hooks_of_a_mirrored_module_see_the_module() -> None:
    model, x, seen = Language(), batch(), []
    pipe = piped(model)
    pipe(x)
    model.head.register_forward_hook(lambda module, *_: seen.append(module))
    pipe(x)
    assert seen == [model.head] * 3
    assert model.head.weight is model.embedding.weight


@pytest.mark.usefixtures("apart")
def test_a_failed_step_leaves_no_gradient_for_the_next() -> None:
    model = Language().double()
    eager, x = copy.deepcopy(model), batch()
    pipe = piped(model, loss_fn=next_token)
    pipe.step(x, target=x)
    with pytest.raises(pc.PipecompileError):
        pipe.step(x, target=x.float())
    assert model.head.weight is model.embedding.weight
    model.zero_grad()
    pipe.step(x, target=x)
    accumulate(eager, x, 3, next_token, x)
    assert_same(model, eager, 1e-11)


def test_one_memory_needs_no_mirror() -> None:
    model, x = Language(), batch()
    pipe = piped(model)
    pipe(x)
    assert not pipe._cache.latest.mirrors.mirrors
    assert not any(isinstance(module, MirroredModule) for stage in pipe.stages for module in stage.module.modules())


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_a_tensor_keeps_its_first_home_until_homes_are_cleared() -> None:
    homes, tensor = Homes(), torch.ones(2)
    assert homes.find(tensor) is None
    assert homes.assign(tensor, "gpu 0") == "gpu 0"
    assert homes.assign(tensor, "gpu 1") == homes.find(tensor) == "gpu 0"
    homes.clear()
    assert homes.find(tensor) is None


def test_a_moved_tensor_on_meta_is_uninitialized_unless_it_is_a_copy() -> None:
    with torch.device("meta"):
        own, copied = OneLayer(), OneLayer()
    homes, cpu = Homes(), torch.device("cpu")
    homes.move(own.layer.weight, cpu)
    homes.move(copied.layer.weight, cpu, is_copy=True)
    assert [t.device for t in (own.layer.weight, copied.layer.weight)] == [cpu, cpu]
    remaining = homes.uninitialized.remaining()
    assert len(remaining) == 1
    assert remaining[0] is own.layer.weight


def test_a_gradient_moves_with_its_parameter_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a model that had gradients failed at its first backward on a GPU: they were on another device."""
    weight, homes = nn.Parameter(torch.zeros(2)), Homes()
    weight.grad = torch.ones(2)
    gradient, places = weight.grad, {torch.device("cpu", 1): 10.0, torch.device("cpu"): -10.0}
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor + places[device])

    def move_and_fail() -> None:
        with homes.all_or_none():
            homes.move(weight, torch.device("cpu", 1))
            assert (weight.data.tolist(), gradient.tolist()) == ([10.0] * 2, [11.0] * 2)
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        move_and_fail()
    assert (weight.data.tolist(), weight.grad.tolist()) == ([0.0] * 2, [1.0] * 2)
    assert weight.grad is gradient


def test_tensors_that_no_stage_uses_get_memory() -> None:
    with torch.device("meta"):
        model = OneLayer()
    homes = Homes()
    homes.assign(model.layer.weight, 0)
    homes.move_unused(model, torch.device("cpu"))
    assert model.layer.weight.is_meta, "its stage moves it"
    assert not model.layer.bias.is_meta


def test_a_model_on_the_cpu_stays_where_it_is() -> None:
    model = OneLayer()
    before = model.layer.weight.data_ptr()
    move_model(model, torch.device("cpu"))
    assert model.layer.weight.data_ptr() == before


def test_a_tensor_that_is_not_where_it_was_placed_is_an_error() -> None:
    """A module that contains the model moves it without the pipeline; a later recording places the stages again."""
    made, homes = specialized(), Homes()
    memories, here = [0, 1], [torch.device("cpu")] * 2
    place_stages(made.graph, made.stages, here, memories, homes)
    place_stages(made.graph, made.stages, here, memories, homes)
    with pytest.raises(pc.InputError, match="was moved to cpu after it was placed\n  where  stage 0, on cuda:0"):
        place_stages(made.graph, made.stages, [torch.device("cuda:0")] * 2, memories, homes)


def test_the_weights_of_a_recurrent_layer_are_one_piece_of_memory_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is moved by itself. Before, every call on a GPU copied all of them together, and warned."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.lstm, self.down = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.lstm(self.up(x))[0])

    model, flattened = Recurrent(), list[nn.Module]()
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: flattened.append(layer))
    pc.compile(model, 2, example_args=(torch.randn(4, 3, 4),), n_microbatches=2, devices=["cpu"] * 2, cost="analytic")
    assert any(layer is model.lstm for layer in flattened)
    flattened.clear()
    move_model(model, torch.device("cpu"))
    assert flattened == [model.lstm]

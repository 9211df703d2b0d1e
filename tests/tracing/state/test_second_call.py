"""Tables that a model makes once: from constants always, from parameters in evaluation mode."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import pipecompile as pc


class Biased(nn.Module):
    """Looks its biases up in a table of parameters, once, as the attention of LeViT and TinyViT does."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(9))
        self.always = always
        self.register_buffer("index", torch.tensor([3, 1, 8, 1]))
        self.known: dict[str, torch.Tensor] = {}

    def bias(self) -> torch.Tensor:
        if self.training and not self.always:
            return self.table[self.index]
        if "cpu" not in self.known:
            self.known["cpu"] = self.table[self.index]
        return self.known["cpu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.bias()


def recorded(*, training: bool, always: bool) -> tuple[nn.Module, torch.fx.GraphModule]:
    model = nn.Sequential(nn.Linear(4, 4), Biased(always=always), Biased(always=always)).train(training)
    return model, pc.trace(model, torch.randn(3, 4))


def test_a_table_of_parameters_is_made_anew_in_evaluation_mode() -> None:
    model, graph = recorded(training=False, always=True)
    assert graph.facts.kept == ()
    assert model[1].known == {}
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(graph(x), model(x))
        model[1].table.mul_(2.0)
        model[1].known.clear()
        assert torch.equal(graph(x), model(x))


def test_a_model_that_makes_none_in_training_is_recorded_through() -> None:
    model, graph = recorded(training=True, always=False)
    assert graph.facts.kept == ()
    x = torch.randn(5, 4)
    graph(x).sum().backward()
    mine, model[1].table.grad = model[1].table.grad, None
    model(x).sum().backward()
    assert torch.equal(mine, model[1].table.grad)


def test_in_training_a_table_that_gradients_go_through_is_no_constant() -> None:
    with pytest.raises(pc.TraceError, match="PC114"):
        pc.trace(Biased(always=True).train(), torch.randn(3, 4))


class Scaled(nn.Module):
    """`weight.float()` gives the weight itself; the state left on the module is started anew in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight, self.state = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = None
        y = self.linear(x) * (1 + self.weight.float())
        self.state = y.detach()
        return y


def test_a_weight_that_a_call_gave_back_is_a_weight_in_the_second_call() -> None:
    model = Scaled()
    graph = pc.trace(model, torch.randn(3, 4))
    x = torch.randn(5, 4)
    assert torch.equal(graph(x), model(x))
    assert torch.equal(model.state, graph(x).detach())


class Anchored(nn.Module):
    """Keeps what `to` gave of constants that are in no table of the module: the constants themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.anchors = nn.Linear(4, 4), [torch.ones(4), torch.arange(4.0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.anchors = [anchor.to(x.dtype) for anchor in self.anchors]
        return self.linear(x) + self.anchors[0] + self.anchors[1]


def test_what_is_kept_is_what_the_first_call_made() -> None:
    model = Anchored()
    graph = pc.trace(model, torch.randn(3, 4))
    x = torch.randn(5, 4)
    assert torch.equal(graph(x), model(x))


class Capturing(nn.Module):
    """Installs hooks in its first call and notes that they are there, as models of transformers do for hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.installed, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), False, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.installed:
            self.b.register_forward_hook(lambda _module, _args, output: self.seen.append(output.detach()))
            self.installed = True
        return self.b(self.a(x))


def test_hooks_and_the_note_of_them_are_left_together_or_not_at_all() -> None:
    model, x = Capturing(), torch.randn(6, 4)
    with pytest.warns(pc.RecordingWarning, match="installed"):
        pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, loss_fn=lambda y: y.sum(), cost="analytic")
    pipe.step(x)
    assert not model.installed
    model.seen.clear()
    output = model(x)
    assert model.installed
    assert torch.equal(model.seen[-1], output)
    pipe.step(x)
    assert len(model.b._forward_hooks) == 1


class Replacing(nn.Module):
    """Replaces tensors that are not buffers by others that do not depend on the inputs, as the anchors of a detection model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.rows, self.one = [torch.arange(4.0), torch.ones(4)], torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "list":
                self.rows = [row.to(x.dtype) for row in self.rows]
            case "item":
                self.rows[0] = self.rows[0].to(x.dtype)
            case "attribute":
                self.one = self.one.to(x.dtype)
            case "each time":
                self.one = torch.arange(4.0) + 7
            case "appended":
                self.rows.append(torch.ones(4))
        return self.linear(x) * self.rows[0] + self.one


@pytest.mark.parametrize("kind", ["list", "item", "attribute", "each time", "appended"])
def test_a_constant_that_replaces_another_is_left_on_the_model(kind: str) -> None:
    model = Replacing(kind).double()
    eager, x = copy.deepcopy(model), torch.randn(6, 4).double()
    pipe = pc.compile(model, 1, devices=["cpu"], loss_fn=torch.mean, n_microbatches=2, cost="analytic")
    for _ in range(3):
        expected = torch.stack([torch.mean(eager(part)) / 2 for part in x.split(3)]).sum()
        torch.testing.assert_close(pipe.step(x), expected.detach())
    for mine, theirs in ((model.one, eager.one), *zip(model.rows, eager.rows, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert pipe._cache.traces <= 2


class Rotary(nn.Module):
    """Makes its tables again for a greater length, and notes the length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.longest, self.table = nn.Linear(4, 4), 0, None

    def forward(self, x):
        if x.size(1) > self.longest:
            self.table, self.longest = torch.arange(x.size(1)).float().cos()[:, None], x.size(1)
        return self.inner(x) * self.table[: x.size(1)]


def test_the_length_of_a_table_is_left_together_with_the_table():
    """The length was written alone, by a node without a value: the first step failed. Later neither was left."""
    model = nn.Sequential(nn.Linear(4, 4), Rotary(), nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (3, 5, 4):
            x = torch.randn(4, length, 4)
            assert torch.equal(pipe(x), torch.cat([twin(part) for part in x.chunk(2)]))
    assert model[1].longest == twin[1].longest == 5
    assert torch.equal(model[1].table, twin[1].table)
    assert torch.equal(model(x), twin(x))


class Noted(nn.Module):
    """Notes a number once, with no table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.width = nn.Linear(4, 4), 0

    def forward(self, x):
        if not self.width:
            self.width = x.size(-1)
        return self.inner(x)


def test_a_number_that_is_noted_once_is_left():
    model = nn.Sequential(nn.Linear(4, 4), Noted())
    pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic")(torch.randn(4, 4))
    assert model[1].width == 4


class Filled(nn.Module):
    """Branches on the batch size behind a table of that size, and leaves what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.start = nn.Buffer(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.start.repeat(len(x), 1) * x
        for row in range(len(x)):
            memory[row] *= row
        self.last = memory.detach()
        return self.mix(memory)


def test_a_size_that_the_first_call_fixed_is_the_same_number_in_the_second() -> None:
    x, model = torch.randn(2, 3), Filled()
    pc.trace(model, x)(x)
    assert torch.equal(model.last, x * torch.tensor([[0.0], [1.0]]))


class Installing(nn.Module):
    """Registers a hook on every layer in the first call, as models of transformers do that return hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
        self.are_installed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.are_installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda _module, _args, output: output * 2)
            self.are_installed = True
        return self.layers(x)


def test_hooks_that_a_call_installs_are_named_alike_in_every_recording_and_not_all_of_them() -> None:
    model, texts = Installing(), []
    for length in (2, 3):
        with pytest.warns(pc.RecordingWarning, match="in a way that a graph cannot") as warned:
            pc.trace(model, torch.randn(2, length, 4))
        texts.append([str(one.message) for one in warned])
    assert texts[0] == texts[1]
    assert "layers.0._forward_hooks" in texts[0][0] or "layers.19._forward_hooks" in texts[0][0]
    assert "and 13 more in a way" in texts[0][0]


class Leaves(nn.Module):
    """Leaves a constant in an attribute that it does not have before."""

    def __init__(self, *, in_dict: bool) -> None:
        super().__init__()
        self.layer, self.in_dict = nn.Linear(6, 6), in_dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6).triu()
        self.mask = {"mask": mask} if self.in_dict else mask
        return self.layer(x) @ mask


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_constant_that_every_call_leaves_is_left_where_none_was(in_dict: bool) -> None:
    """It was taken for a table that is made once, and left by no run."""
    model = Leaves(in_dict=in_dict)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic")
    pipe(torch.randn(4, 6))
    left = model.mask["mask"] if in_dict else model.mask
    assert torch.equal(left, torch.ones(6, 6).triu())

"""Runs that are observed and undone: values by name, also of outputs that are the model's own memory."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.verifiers.eager_run import CheckedCall, observe, random_states_of


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.count += 1
        return {"y": self.a(x), "count": self.count}


def test_values_gradients_and_buffers_are_those_of_the_run() -> None:
    model, x = Counter(), torch.ones(3, 2, requires_grad=True)
    call = CheckedCall(model, flatten(model.forward, (x,), {}), torch.device("cpu"), True, lambda y: y["y"].sum())
    seen = observe(model, call, random_states_of(call))
    assert (model.count, x.grad, model.a.weight.grad) == (0, None, None)
    assert (seen.values["buffer count"], seen.drawn) == (1, ())
    assert torch.equal(seen.values["gradient of a.bias"], torch.full((2,), 3.0))
    assert torch.allclose(seen.values["gradient of x"], model.a.weight.sum(0).expand(3, 2))
    counts = [seen.values[f"output {index}"] for index in range(2)]
    assert any(value.dim() == 0 and value == 1 for value in counts)


class Force(nn.Module):
    """Frees the graph of its energy in evaluation, as molecular models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = self.a(x).tanh().sum(-1)
        (force,) = torch.autograd.grad(energy.sum(), x)
        return energy, force


def test_outputs_of_a_forward_that_frees_its_graph_are_compared_without_gradients() -> None:
    model, x = Force().eval(), torch.ones(4, 2)
    call = CheckedCall(model, flatten(model.forward, (x,), {}), torch.device("cpu"), True, lambda _: None)
    seen = observe(model, call, random_states_of(call))
    assert seen.values["gradient of the outputs"] == "freed by the forward"
    assert torch.equal(seen.values["output 1"], model(x)[1])


def test_a_recording_of_a_forward_that_frees_its_graph_is_checked() -> None:
    pipe = pc.compile(Force().eval(), 1, n_microbatches=2, progress=False)
    pipe(torch.ones(4, 2))
    assert "raises" not in str(pipe.explain())

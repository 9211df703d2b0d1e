"""Guards on what is neither the model's nor plain: objects among the inputs, containers of the standard library, `threading.local`."""

from __future__ import annotations

import copy
import threading
from collections import ChainMap, UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate

LOCAL = threading.local()
BANK: list[torch.Tensor] = []
HIDDEN = [nn.BatchNorm1d(4)]


class Net(nn.Module):
    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor, config: Any = None) -> torch.Tensor:
        scale = self.factor() if config is None else config.scale
        return torch.as_tensor(self.b(self.a(x)) * scale)


def compiled(model: nn.Module, **options: Any) -> pc.Pipeline:
    return pc.compile(
        model, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=lambda y: y.square().mean(), cost="analytic", **options
    )


class Config:
    scale = 1.0


def test_an_object_among_the_inputs_is_guarded() -> None:
    """Its attributes became constants: `config.scale = 3.0` changed nothing."""
    model, config, x = Net(lambda: 1.0), Config(), torch.randn(4, 4)
    pipe = compiled(model)
    for config.scale in (1.0, 3.0, 3.0):
        assert torch.equal(pipe(x, config), torch.cat([model(part, config) for part in x.chunk(2)]))
    assert pipe.explain().traces == 2


TABLES: dict[str, Any] = {"UserDict": UserDict(k=1.0), "ChainMap": ChainMap({"k": 1.0}, {})}


@pytest.mark.parametrize("name", TABLES)
def test_a_mapping_of_the_standard_library_is_guarded(name: str) -> None:
    table, x = TABLES[name], torch.randn(4, 4)
    model = Net(lambda: table["k"])
    pipe = compiled(model)
    for table["k"] in (1.0, 2.0):
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


def test_a_variable_of_a_thread_is_guarded() -> None:
    model, x = Net(lambda: LOCAL.factor), torch.randn(4, 4)
    pipe = compiled(model, dispatch="threads")
    for LOCAL.factor in (1.0, 2.0):
        eager = copy.deepcopy(model)
        assert torch.equal(pipe.step(x), accumulate(eager, x, 2, lambda y: y.square().mean()))


class Drawing(Net):
    def forward(self, x: torch.Tensor, generator: Any = None) -> torch.Tensor:
        return torch.as_tensor(self.b(self.a(x) + torch.randn(x.shape, generator=generator)))


def test_a_generator_among_the_inputs_is_not_advanced_by_compiling() -> None:
    """The recording and its check drew from it."""
    model, x = Drawing(lambda: 1.0), torch.randn(4, 4)
    pipe, eager = compiled(model), copy.deepcopy(model)
    mine, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(2):
        loss = sum(eager(part, theirs).square().mean() / 2 for part in x.chunk(2))
        assert torch.equal(pipe.step(x, mine), torch.as_tensor(loss))
    assert torch.equal(mine.get_state(), theirs.get_state())


class Hidden(Net):
    def forward(self, x: torch.Tensor, config: Any = None) -> torch.Tensor:
        return torch.as_tensor(self.b(HIDDEN[0](self.a(x))))


def test_a_module_in_a_global_list_is_left_to_the_steps() -> None:
    """The check updated its running statistics."""
    pipe = compiled(Hidden(lambda: 1.0), batch_norm="each")
    pipe.step(torch.randn(4, 4))
    assert int(HIDDEN[0].num_batches_tracked) == 2


class Banked(Net):
    def forward(self, x: torch.Tensor, config: Any = None) -> torch.Tensor:
        h = self.a(x)
        BANK.append(h.detach())
        return torch.as_tensor(self.b(h))


def test_a_change_of_a_global_is_warned_of_and_leaves_no_fake_tensor() -> None:
    """Fake tensors were left in the list, and the check failed with an error of torch's."""
    with pytest.warns(pc.RecordingWarning, match="changes BANK, which is not part of the model"):
        compiled(Banked(lambda: 1.0)).step(torch.randn(4, 4))
    assert BANK == []

"""Plain functions that the forward of the whole model calls, kept whole because Python decides there on values."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.plain_functions import function_name, function_of, functions_replaced


def mask_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def solved(field: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, steps: int = 3) -> torch.Tensor:
    while steps > 0 and float(x.detach().abs().mean()) < 1e6:
        x, steps = x + 0.1 * field(x), steps - 1
    return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * mask_of(lengths)[..., None]
        return self.head(solved(self.field, x))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_functions_are_kept_whole_and_train_as_in_eager() -> None:
    torch.manual_seed(0)
    model = Net()
    x, lengths = torch.randn(4, 5, 4), torch.tensor([5, 2, 3, 5])
    pipe = pc.compile(model, 3, n_microbatches=2, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 3, dispatch="inline", schedule=in_turn)  # fmt: skip
    for swapped in (False, True):
        if swapped:
            model.field = nn.Linear(4, 4)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        pipe.step(x, lengths)
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        for part, some in zip(x.chunk(2), lengths.chunk(2), strict=True):
            (loss_fn(model(part, some)) / 2).backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    (recording, *_) = pipe.explain().kept
    assert [line.split()[0] for line in recording.kept] == ["mask_of", "solved"]


def in_turn(n_stages: int, n_microbatches: int, _n_devices: int) -> pc.Schedule:
    rows = [",".join(f"{s}F{m},{s}B{m}" for m in range(n_microbatches)) for s in range(n_stages)]
    return pc.Schedule.from_csv("\n".join(rows) + "\n")


def number_of(x: torch.Tensor) -> float:
    return float(x.sum())


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * number_of(x)


def test_a_function_whose_result_the_data_decide_is_refused_with_its_line() -> None:
    with pytest.raises(pc.TraceError, match=r"in number_of: .*float\(x.sum\(\)\)"):
        pc.trace(Refused(), torch.randn(4, 4))


def test_names_stand_for_the_replacement_inside_the_block_alone() -> None:
    def new(lengths: torch.Tensor) -> torch.Tensor:
        return lengths

    old, name = mask_of, f"{__name__}:mask_of"
    if __name__ not in sys.modules:
        pytest.skip("this file is not a module of the process")
    assert function_of(name) is old
    with functions_replaced([(old, new)]):
        assert mask_of is new
    assert mask_of is old


def test_frames_of_functions_that_no_module_names_have_no_name() -> None:
    def local() -> str:
        return function_name(sys._getframe())

    assert local() == ""

"""The same promises on CUDA. Skipped where there is no GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def models(devices: list[str]) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    eager = copy.deepcopy(model).to(devices[0])
    return model, eager, torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n_gpus", [1, 2])
def test_gradients_equal_eager(dispatch: str, schedule: str, n_gpus: int) -> None:
    if torch.cuda.device_count() < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs")
    devices = [f"cuda:{i * n_gpus // 4}" for i in range(4)]
    model, eager, x, target = models(devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = pc.compile(
        model,
        4,
        example_args=(x,),
        n_microbatches=4,
        loss_fn=F.cross_entropy,
        schedule=schedule,
        devices=devices,
        dispatch=dispatch,
    )
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        loss = pipe.step(x, target=target)
        expected = accumulate(eager, x.cuda(), 4, F.cross_entropy, target.cuda())
    torch.testing.assert_close(loss.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad.cpu(), rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]
    optimizer.step()


def test_parameters_move_in_place_and_call_returns_to_autograd() -> None:
    model, eager, x, target = models(["cuda:0"])
    before = list(model.parameters())
    pipe = pc.compile(model, 4, example_args=(x,), devices=["cuda:0"] * 4, cost="analytic")
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    assert all(p.is_cuda for p in before)
    F.cross_entropy(pipe(x.cuda()), target.cuda()).backward()
    parts = torch.cat([eager(part) for part in torch.tensor_split(x.cuda(), 8)])
    F.cross_entropy(parts, target.cuda()).backward()
    torch.testing.assert_close(before[0].grad, next(eager.parameters()).grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cuda_graphs", [True, "step"])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "except_last"}, {"schedule": "gpipe"}], ids=str)
def test_cuda_graphs_have_the_numbers_of_stages_as_they_are(options: dict[str, Any], cuda_graphs: bool | str) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    ]
    graphed = nn.Sequential(*layers).cuda()
    plain, x, target = copy.deepcopy(graphed), torch.randn(32, 64).cuda(), torch.randint(0, 4, (32,)).cuda()
    found = []
    for model, graphs in ((graphed, cuda_graphs), (plain, False)):
        how = {"devices": ["cuda:0"] * 2, "cost": "analytic", "batch_norm": "each", **options}
        pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=F.cross_entropy, cuda_graphs=graphs, **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            losses.append(pipe.step(x, target=target))
            optimizer.step()
        found.append([*losses, *model.parameters(), *model.buffers()])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_a_step_is_one_graph_and_adds_to_gradients_as_eager_does() -> None:
    """From the second step on one launch; inputs of other values and sizes, gradients kept and added to, in all schedules that split."""
    for schedule in ("1f1b", "zb-h1", "gpipe"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
        eager = copy.deepcopy(model)
        options = {"devices": ["cuda:0"] * 2, "loss_fn": F.cross_entropy, "cost": "analytic", "schedule": schedule}
        pipe = pc.compile(model, 2, n_microbatches=4, cuda_graphs="step", **options)
        for step in range(5):
            x, target = torch.randn(32, 64), torch.randint(0, 4, (32,))
            pipe.step(x, target=target)
            for part, wanted in zip(x.cuda().split(8), target.cuda().split(8), strict=True):
                (F.cross_entropy(eager(part), wanted) / 4).backward()
            for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
            if step == 2:
                model.zero_grad(), eager.zero_grad()
        (executable,) = pipe._cache.latest.executables.values()
        assert executable.step_graphs is not None
        assert executable.step_graphs.reason is None


def test_a_loss_that_waits_is_not_captured_and_harms_nothing() -> None:
    model, x, target = (
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).cuda(),
        torch.randn(8, 8),
        torch.randint(0, 4, (8,)),
    )

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        assert loss.item() > 0
        return loss

    pipe = pc.compile(model, 2, devices=["cuda:0"] * 2, loss_fn=loss_fn, cost="analytic", cuda_graphs=True)
    with pytest.warns(pc.RecordingWarning, match="stage 1 runs without CUDA graphs: the host waits"):
        losses = [pipe.step(x, target=target) for _ in range(4)]
    assert torch.rand(3, device="cuda").isfinite().all()
    assert len({loss.item() for loss in losses}) == 1

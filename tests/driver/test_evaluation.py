"""An evaluation gives the numbers of the usual loop, and leaves modes, gradients and statistics as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.batching.microbatch_list import arguments_of
from pipecompile.driver.evaluation import RunningTotal
from pipecompile.errors import InputError

GENERATOR = torch.Generator().manual_seed(0)
LOADER = [(torch.randn(n, 6, generator=GENERATOR), torch.randint(0, 3, (n,), generator=GENERATOR)) for n in (8, 8, 3)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def piped(model: nn.Module, **options: Any) -> pc.Pipeline:
    usual: dict[str, Any] = {
        "devices": ["cpu"] * 2,
        "n_microbatches": 2,
        "loss_fn": F.cross_entropy,
        "cost": "analytic",
    }
    return pc.compile(model, 2, **{"batch_norm": "each", **usual, **options})


def right(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    return {"accuracy": (output.argmax(1) == target).float().mean(), "one": 1}


@torch.no_grad()
def usual_loop(model: nn.Module) -> tuple[float, float]:
    model.eval()
    loss = sum(float(F.cross_entropy(model(x), y)) * len(x) for x, y in LOADER)
    return loss / 19, sum(float((model(x).argmax(1) == y).sum()) for x, y in LOADER) / 19


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_the_numbers_are_those_of_the_usual_loop(dispatch: str) -> None:
    model = net()
    loss, accuracy = usual_loop(copy.deepcopy(model))
    pipe, state = piped(model, dispatch=dispatch), copy.deepcopy(model.state_dict())
    pipe.train()
    model[2].eval()
    plain, measured = pipe.evaluate(LOADER), pipe.evaluate(LOADER, right)
    assert plain.loss == pytest.approx(loss, rel=1e-6)
    assert measured.loss == pytest.approx(loss, rel=1e-6)
    assert plain.samples == measured.samples == 19
    assert not plain.metrics
    assert measured.metrics == pytest.approx({"accuracy": accuracy, "one": 1.0}, rel=1e-6)
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert pipe.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_modes_are_restored_after_an_error() -> None:
    pipe = piped(net())

    def fail(output: torch.Tensor, target: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        raise KeyError("metric")

    with pytest.raises(KeyError):
        pipe.evaluate(LOADER, fail)
    assert all(module.training for module in pipe.model.modules())
    assert torch.is_grad_enabled()


def test_a_metric_may_keep_its_own_count_and_a_loss_its_aux() -> None:
    seen: list[int] = []
    pipe = piped(net(), loss_fn=lambda output, target: (F.cross_entropy(output, target), len(target)), has_aux=True)
    result = pipe.evaluate(({"input": x, "target": y} for x, y in LOADER), lambda output, _: seen.append(len(output)))
    assert seen == [8, 8, 3]
    assert not result.metrics
    assert result.loss == pytest.approx(pipe.evaluate(LOADER).loss, rel=1e-6)


def test_a_sum_stays_a_sum_and_a_model_may_have_its_own_loss() -> None:
    total = RunningTotal(is_mean=False)
    for count in (2, 3):
        total.add(torch.tensor(4.0), count, torch.tensor(1.0))
    result = total.evaluation()
    assert (result.loss, result.samples, result.metrics) == (8.0, 5, {"metric": 1.0})
    pipe = piped(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)), loss_fn=torch.Tensor.mean)
    expected = sum(float(pipe.model(x).mean().detach()) * len(x) for x, _ in LOADER) / 19
    assert pipe.evaluate(x for x, _ in LOADER).loss == pytest.approx(expected, rel=1e-6)


def test_arguments_by_name_in_order_or_alone() -> None:
    assert arguments_of({"x": 1, "target": 2}, with_target=True) == ((), {"x": 1, "target": 2})
    assert arguments_of([1, 2, 3], with_target=True) == ((1, 2), {"target": 3})
    assert arguments_of((1, 2), with_target=False) == ((1, 2), {})
    assert arguments_of(1, with_target=True) == ((1,), {})


def test_a_loader_without_batches_is_an_error() -> None:
    with pytest.raises(InputError, match="nothing to evaluate"):
        piped(net()).evaluate([])


def test_a_batch_in_place_of_batches_says_what_to_write() -> None:
    with pytest.raises(InputError, match=r"(?s)batch 0 has no target.*evaluate\(\[\(x, y\)\]\)"):
        piped(net()).evaluate(LOADER[0])

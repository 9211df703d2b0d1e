from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import RunError
from pipecompile.ir import Kind, Schedule
from pipecompile.passes.offloading import insert_offload
from pipecompile.runtime.cells.offload import HostBuffer, SavedTensors, resident_storages
from pipecompile.schedules import build_schedule
from pipecompile.torch_private.autograd_engine import other_users


class Wide(nn.Module):
    """A model with a skip, dropout, a view that is saved, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.middle, self.last = nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(F.gelu(self.norm(self.first(x))))
        z = F.relu(self.middle(y), inplace=True)
        return self.last(torch.tanh(z.view(-1, 4, 8).transpose(1, 2).reshape(-1, 32)) + y)


def gradients(model: nn.Module, schedule: Schedule, dispatch: str = "inline") -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    x, target = torch.randn(8, 12), torch.randint(0, 5, (8,))
    pipe = pc.compile(
        model, schedule.n_stages, example_args=(x,), n_microbatches=schedule.n_microbatches, loss_fn=F.cross_entropy,
        cost="analytic", schedule=schedule, batch_norm="each", dispatch=dispatch,
    )  # fmt: skip
    for _ in range(2):
        torch.manual_seed(1)
        pipe.step(x, target=target)
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_and_buffers_are_those_without_offloading_bit_for_bit(name: str, dispatch: str) -> None:
    torch.manual_seed(0)
    model = Wide()
    schedule = build_schedule(name, 2, 4)
    moved = insert_offload(schedule)
    assert any(action.kind is Kind.OFFLOAD for row in moved.rows for action in row)
    expected = gradients(copy.deepcopy(model), schedule, "inline")
    found = gradients(copy.deepcopy(model), moved, dispatch)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert value is not None
        assert found[key] is not None
        assert torch.equal(found[key], value), key


def saved_by(function: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> tuple[SavedTensors, torch.Tensor]:
    tensors = SavedTensors(resident_storages(module))
    x = torch.randn(4, 6)
    with torch.autograd.graph.saved_tensors_hooks(tensors.pack, tensors.unpack):
        return tensors, function(x)


def test_the_memory_of_saved_tensors_is_free_while_the_host_has_them() -> None:
    layer = nn.Linear(6, 8)
    tensors, out = saved_by(lambda x: layer(x).tanh().exp(), layer)
    on_device = [storage for storage in tensors.storages if storage is not None]
    bytes_held = sum(storage.nbytes for storage in on_device)
    before = [other_users(storage) for storage in on_device]
    assert bytes_held == 4 * 6 * 4 + 2 * 4 * 8 * 4, "the input, tanh and exp; not the weight"
    tensors.offload()
    assert tensors.storages == [None] * 3
    assert sum(host.nbytes for host in tensors.host) == bytes_held
    after = [other_users(storage) for storage in on_device]
    assert after == [0, 0, 1], f"nothing else has the memory, where {before} had; exp is the output"
    with pytest.raises(RuntimeError, match="is on the host: its RELOAD has not run"):
        out.sum().backward()


def test_a_reloaded_tensor_gives_the_same_gradient() -> None:
    layer = nn.Linear(6, 8)
    torch.manual_seed(3)
    tensors, out = saved_by(lambda x: layer(x).tanh().exp(), layer)
    tensors.offload()
    tensors.reload(torch.device("cpu"))
    out.sum().backward()
    found = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    torch.manual_seed(3)
    layer(torch.randn(4, 6)).tanh().exp().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(found, [p.grad for p in layer.parameters()], strict=True))  # type: ignore[arg-type]


def test_views_of_one_memory_move_once() -> None:
    tensors, _ = saved_by(lambda x: (x.requires_grad_()[:2] * x[2:]).sum(), nn.Identity())
    assert len(tensors.storages) == 1


def test_what_was_written_after_it_was_saved_is_an_error_as_in_eager() -> None:
    layer = nn.Linear(6, 8)
    tensors, out = saved_by(lambda x: layer(x).exp(), layer)
    with torch.no_grad():
        out.mul_(2)
    tensors.offload()
    tensors.reload(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_was_written_and_is_not_read_is_no_error_as_in_eager() -> None:
    layer = nn.Linear(6, 8)
    unread = list[torch.Tensor]()

    def function(x: torch.Tensor) -> torch.Tensor:
        unread.append(layer(x).exp().mul_(2))
        return layer(x)

    tensors, out = saved_by(function, layer)
    tensors.offload()
    tensors.reload(torch.device("cpu"))
    out.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unread[0].sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((8,), 4.0))  # type: ignore[arg-type]


def test_a_backward_between_the_copies_names_its_stage() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    schedule = insert_offload(build_schedule("gpipe", 2, 4))
    x = torch.randn(8, 6)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=F.mse_loss, cost="analytic", schedule=schedule
    )
    pipe.step(x, target=x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensors, "reload", lambda *_: None)
        with pytest.raises(RunError, match=r"stage 1.*its RELOAD has not run"):
            pipe.step(x, target=x)


def test_hooks_of_the_user_see_the_tensors_and_nothing_moves() -> None:
    torch.manual_seed(0)
    model, schedule = Wide(), build_schedule("gpipe", 2, 4)
    expected = gradients(copy.deepcopy(model), schedule)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(copy.deepcopy(model), insert_offload(schedule))
    assert all(torch.equal(found[key], value) for key, value in expected.items())  # type: ignore[arg-type]


def test_complex_and_sparse_tensors_stay_or_move_without_a_change() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.fft(self.first(x))
            return self.last((spectrum.conj() * spectrum * 1j).imag.tanh())

    torch.manual_seed(0)
    model, schedule = Spectral(), build_schedule("gpipe", 2, 4)
    expected, found = (gradients(copy.deepcopy(model), s) for s in (schedule, insert_offload(schedule)))
    assert all(torch.equal(found[key], value) for key, value in expected.items())  # type: ignore[arg-type]


def test_the_host_has_its_copies_whatever_the_default_device_is() -> None:
    """Under `torch.set_default_device("cuda")` torch was asked for page-locked memory of the GPU, and raised."""
    with torch.device("meta"):
        (copied,) = HostBuffer().copies_of([torch.ones(8, dtype=torch.uint8, device="cpu")])
    assert copied.tolist() == [1] * 8

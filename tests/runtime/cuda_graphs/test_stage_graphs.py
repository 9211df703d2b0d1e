"""Stages as CUDA graphs, on an emulated device: what is captured and replayed has the numbers of stages that run as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet
from transformers import GPT2Config, GPT2LMHeadModel

import pipecompile as pc
from tests.support.emulated_capture import EmulatedCaptures
from tests.support.models import UNet
from tests.test_pipeline import Net, batch

PLAIN: dict[str, Any] = {
    "cost": "analytic", "devices": ["cpu"] * 2, "n_microbatches": 4, "dispatch": "inline", "batch_norm": "each",
}  # fmt: skip

SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "checkpoint": "except_last"},
    {"schedule": "interleaved", "n_stages": 4},
    {"schedule": "gpipe", "checkpoint": "always", "restored": 2},
    {"schedule": "zb-h1", "checkpoint": "always"},
]


Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor] | None, Tensor | None]


def net() -> Case:
    x, target = batch(9)
    return Net(), (x,), {}, F.cross_entropy, target


def dropped() -> Case:
    """Micro-batches of two sizes, and a mask that is drawn anew in every replay."""
    layers = [
        nn.Linear(8, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(8, 4),
    ]
    x, target = batch(9)
    return nn.Sequential(*layers), (x,), {}, F.cross_entropy, target


def resnet() -> Case:
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)
    return model, (torch.randn(8, 3, 32, 32),), {}, F.cross_entropy, torch.randint(0, 4, (8,))


def unet() -> Case:
    return UNet(), (torch.randn(8, 3, 16, 16),), {}, lambda made: made.square().mean(), None


def gpt2() -> Case:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 32, (8, 8))
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}, None, None


def trained(pipe: pc.Pipeline, case: Case, steps: int, **ambient: Any) -> list[Tensor]:
    """Losses, then gradients and buffers of the last step, then weights. Every second step adds to the gradients before."""
    _, args, kwargs, _, target = case
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found: list[Tensor] = []
    for step in range(steps):
        with torch.autocast("cpu", **ambient) if ambient else torch.enable_grad():
            found.append(pipe.step(*args, target=target, **kwargs))
        if step % 2 and step < steps - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 4 == 1)
    found += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    optimizer.step()
    return [*found, *pipe.parameters(), *pipe.buffers()]


def both(case: Callable[[], Case], **options: Any) -> tuple[pc.Pipeline, pc.Pipeline, Case]:
    """A pipeline with graphs, and the same without."""
    torch.manual_seed(0)
    made = case()
    options = {"n_stages": 2, "loss_fn": made[3]} | PLAIN | options
    plain = copy.deepcopy(made[0])
    return pc.compile(made[0], cuda_graphs=True, **options), pc.compile(plain, **options), made


def equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.mark.filterwarnings("ignore:the schedule splits backwards")
@pytest.mark.sampled(13)
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", [net, dropped, resnet, unet, gpt2])
def test_the_numbers_of_stages_as_they_are(
    captures: EmulatedCaptures, case: Callable[[], Case], options: dict[str, Any]
) -> None:
    graphs, plain, made = both(case, **options)
    assert equal(trained(graphs, made, 5), trained(plain, made, 5))
    assert captures.captured
    assert captures.replayed > 2 * captures.captured


@pytest.mark.smoke
def test_each_slot_is_captured_once_forward_and_backward(captures: EmulatedCaptures) -> None:
    graphs, _, (_, (x,), _, _, target) = both(resnet, schedule="1f1b")
    counts = []
    for _ in range(4):
        graphs.step(x, target=target)
        counts.append((captures.captured, captures.replayed))
    assert counts == [
        (0, 0),
        (9, 13),
        (9, 29),
        (9, 45),
    ]  # 2 and 1 in flight; 2 stages, 4 micro-batches, there and back, which writes or adds; 3 rehearsed
    for replayed in (61, 77):
        graphs.zero_grad()
        graphs.step(x, target=target)
        assert (captures.captured, captures.replayed) == (9, replayed)


def test_stages_are_captured_on_aliases_of_their_weights(captures: EmulatedCaptures) -> None:
    graphs, _, (_, (x,), _, _, target) = both(resnet, schedule="1f1b")
    for _ in range(2):
        graphs.step(x, target=target)
    (executable,) = graphs._cache.latest.executables.values()
    stages = [stage for cell in executable.cells for stage in cell.code._captured.values()]  # type: ignore[union-attr]
    weights = set(map(id, graphs.model.parameters()))
    assert captures.captured == 3 * len(stages) > 0
    assert all(weights.isdisjoint(map(id, stage.leaves)) for stage in stages)
    assert all(weights.issuperset(map(id, stage.weights)) for stage in stages)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(captures: EmulatedCaptures, dtype: torch.dtype) -> None:
    graphs, plain, made = both(gpt2, checkpoint="except_last")
    assert equal(trained(graphs, made, 4, dtype=dtype), trained(plain, made, 4, dtype=dtype))
    assert captures.replayed


def test_what_autocast_casts_is_cast_by_the_graph_that_uses_it(captures: EmulatedCaptures) -> None:
    """Micro-batches of 3 and 2 samples are captured side by side, and then only those of 2 are replayed."""
    graphs, plain, (_, (x,), _, _, target) = both(dropped)
    assert target is not None

    def stepped(pipe: pc.Pipeline) -> list[Tensor]:
        torch.manual_seed(5)
        optimizer, losses = torch.optim.SGD(pipe.parameters(), lr=1.0), []
        for samples in (9, 9, 8, 8):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(pipe.step(x[:samples], target=target[:samples]))
            optimizer.step()
        return losses

    assert equal(stepped(graphs), stepped(plain))
    assert captures.captured == 3 * (1 + 2) + 3 * (1 + 1)  # of 3 and of 2 samples: slots of stage 0, of stage 1


def test_outputs_without_gradients_are_the_callers_own(captures: EmulatedCaptures) -> None:
    graphs, plain, (_, (x,), _, _, _) = both(dropped)
    for mode in (torch.no_grad, torch.inference_mode):
        graphs.eval(), plain.eval()
        with mode():
            outputs = [graphs(x + step) for step in range(4)]
            assert equal(outputs, [plain(x + step) for step in range(4)])
    assert captures.captured == 2 * 2 * 2  # modes, stages, sizes of micro-batches
    assert captures.replayed


def test_a_call_with_a_backward_to_come_runs_as_it_is(captures: EmulatedCaptures) -> None:
    graphs, plain, (_, (x,), _, _, _) = both(net)
    for pipe in (graphs, plain):
        for step in range(3):  # two calls before their backwards
            (pipe(x).sum() * pipe(x + step).sum()).backward()
    assert equal(*([p.grad for p in pipe.parameters() if p.grad is not None] for pipe in (graphs, plain)))  # type: ignore[arg-type]
    assert not captures.captured


def test_weights_that_move_or_freeze_are_captured_anew(captures: EmulatedCaptures) -> None:
    graphs, plain, made = both(dropped)
    counts = []
    for change in range(3):
        for pipe in (graphs, plain):
            first, *_, last = pipe.parameters()
            if change == 1:
                first.data = first.data + 1
            elif change == 2:
                last.requires_grad_(False)
        assert equal(trained(graphs, made, 3), trained(plain, made, 3))
        counts.append(captures.captured)
    assert counts[0] < counts[1] < counts[2]


def test_another_precision_is_captured_anew(captures: EmulatedCaptures, matmul: Any) -> None:
    """Before, a graph went on with the kernels of the precision in which it was captured, whatever was set later."""
    graphs, _, made = both(dropped)
    counts = []
    for precision in ("ieee", "tf32", "ieee"):
        matmul.fp32_precision = precision
        trained(graphs, made, 3)
        counts.append(captures.captured)
    assert 0 < counts[0] < counts[1] == counts[2]


def test_weights_that_always_move(captures: EmulatedCaptures) -> None:
    graphs, plain, made = both(dropped)

    def trained_moving(pipe: pc.Pipeline) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for _ in range(8):
            weight = next(pipe.parameters())
            weight.data = weight.data.clone()
            losses.append(pipe.step(*made[1], target=made[4]))
        return losses

    with pytest.warns(pc.RecordingWarning, match="stage 0 .* in other memory again and again"):
        mine = trained_moving(graphs)
    assert equal(mine, trained_moving(plain))


def test_hooks_of_layers_are_called(captures: EmulatedCaptures) -> None:
    graphs, _, made = both(net)
    trained(graphs, made, 2)
    seen: list[object] = []
    handle = graphs.model.last.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(pc.RecordingWarning, match="stage 1 .* as long as there are hooks on its layers"):
        graphs.step(*made[1], target=made[4])
    handle.remove()
    before = captures.replayed
    graphs.step(*made[1], target=made[4])
    assert len(seen) == 4
    assert captures.replayed == before + 16


def test_hooks_of_weights_get_gradients_that_stay(captures: EmulatedCaptures) -> None:
    graphs, plain, made = both(net)
    found = []
    for pipe in (graphs, plain):
        kept: list[Tensor] = []
        first, last = pipe.model.first.weight, pipe.model.last.weight
        last.register_hook(kept.append)
        last.register_post_accumulate_grad_hook(lambda weight, kept=kept: kept.append(weight.grad.clone()))
        node = first.view_as(first).grad_fn.next_functions[0][0]  # autograd's, as DistributedDataParallel has it
        node.register_hook(lambda *_, kept=kept, first=first: kept.append(first.grad.clone()))
        losses = trained(pipe, made, 3)
        found.append([*losses, *kept])
    assert len(kept) == 3 * 4 * 3
    assert equal(*found)
    assert captures.replayed


class Gate(nn.Module):
    """Kept whole, since Python decides by a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.mean() > 0 else x / 2


class Noting(nn.Module):
    """Keeps what it saw last."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return x


def waiting(made: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(made, target)
    assert loss.item() > 0
    return loss


class Stern(torch.autograd.Function):
    """Whose backward looks at its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert gradient.sum().item() < 1e6
        return gradient * 2


def stern(made: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = Stern.apply(F.cross_entropy(made, target))  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize(
    ("between", "loss", "options", "reason"),
    [
        (Gate(), F.cross_entropy, {}, "stage 0 .*Python runs in OpaqueModule"),
        (Noting(), F.cross_entropy, {}, "stage . .*Python runs at keep"),
        (nn.BatchNorm1d(8), F.cross_entropy, {"batch_norm": "deferred"}, "stage 0 .*Python runs in DeferredBatchNorm"),
        (nn.Identity(), waiting, {}, "stage 1 .*the host waits for _local_scalar_dense"),
        (nn.Identity(), stern, {}, "stage 1 .*its backward: the host waits for _local_scalar_dense"),
    ],
)
def test_a_stage_that_cannot_be_captured_says_why(
    captures: EmulatedCaptures, between: nn.Module, loss: Callable[..., Tensor], options: dict[str, Any], reason: str
) -> None:
    x, target = batch(8)

    def case() -> Case:
        layers = [nn.Linear(8, 8), copy.deepcopy(between), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
        return nn.Sequential(*layers), (x,), {}, loss, target

    graphs, plain, made = both(case, balance=[2, 3], **options)
    with pytest.warns(pc.RecordingWarning, match=reason) as told:
        mine = trained(graphs, made, 4)
    assert len([each for each in told if "CUDA" in str(each.message)]) == 1
    assert equal(mine, trained(plain, made, 4))
    assert captures.replayed  # the other stage


def test_a_stage_whose_saved_values_are_copied_to_the_host_runs_uncaptured(captures: EmulatedCaptures) -> None:
    """Before, a graph was replayed again while the copy of what it had saved was all that the program kept."""
    graphs, plain, made = both(net, schedule="po-half", n_stages=4)
    with pytest.warns(pc.RecordingWarning, match="stage 0 .*what its forwards save is copied to the host"):
        mine = trained(graphs, made, 4)
    assert equal(mine, trained(plain, made, 4))


def test_inputs_of_many_kinds(captures: EmulatedCaptures) -> None:
    graphs, plain, (_, (x,), _, _, target) = both(lambda: (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), *net()[1:]))

    def stepped(pipe: pc.Pipeline) -> list[Tensor]:
        sizes = [4, 8, 12, 16, 20, 24] * 2
        losses = [pipe.step(x.repeat(3, 1)[:size], target=target.repeat(3)[:size]) for size in sizes]
        return [*losses, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]

    with pytest.warns(pc.RecordingWarning, match="more than 4 kinds"):
        mine = stepped(graphs)
    assert equal(mine, stepped(plain))


def test_where_there_are_no_graphs() -> None:
    with pytest.warns(pc.RecordingWarning, match="there are no graphs on cpu"):
        graphs, plain, made = both(net)
    assert equal(trained(graphs, made, 2), trained(plain, made, 2))

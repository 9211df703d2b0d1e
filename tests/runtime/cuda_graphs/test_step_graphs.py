"""Which steps are one graph, when they are captured anew, and why a step cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc
from pipecompile import compiling
from pipecompile.runtime.cuda_graphs import captured_step, step_graphs
from pipecompile.runtime.cuda_graphs.step_graphs import step_obstacle
from tests.support.emulated_capture import EmulatedCaptures
from tests.support.graphed_steps import both, compiled, data, equal, net, told, trained


def test_more_than_four_kinds_of_inputs(captures: EmulatedCaptures) -> None:
    def stepped(pipe: pc.Pipeline) -> list[Tensor]:
        sizes = (4, 8, 12, 16, 20, 24) * 2
        return [pipe.step(data(step, size)[0], target=data(step, size)[1]) for step, size in enumerate(sizes)]

    graphs, plain = both(net())
    with told("for more than 4 kinds of inputs"):
        mine = stepped(graphs)
    assert equal(mine, stepped(plain))


def test_another_precision_is_captured_anew(captures: EmulatedCaptures, matmul: Any) -> None:
    graphs, _ = both(net())
    matmul.fp32_precision = "ieee"
    trained(graphs, 3)
    before = captures.replayed
    matmul.fp32_precision = "tf32"
    trained(graphs, 3)
    assert captures.replayed - before == 3 - 1  # the first step is a rehearsal


def test_weights_that_move_or_freeze_and_other_schedules_are_captured_anew(captures: EmulatedCaptures) -> None:
    def change(pipe: pc.Pipeline, step: int) -> None:
        first, *_, last = pipe.parameters()
        if step == 3:
            first.data = first.data + 1
        if step == 6:
            last.requires_grad_(False)
        if step == 9:
            pipe.reschedule("gpipe", 2)

    graphs, plain = both(net())
    with told():
        mine = trained(graphs, 12, change)
    assert equal(mine, trained(plain, 12, change))
    assert captures.replayed == 12 - 4  # the first step of each kind is a rehearsal


def test_weights_that_move_again_and_again(captures: EmulatedCaptures) -> None:
    def change(pipe: pc.Pipeline, step: int) -> None:
        if step % 2 == 0:
            weight = next(pipe.parameters())
            weight.data = weight.data.clone()

    graphs, plain = both(net())
    with told("weights are in other memory again and again"):
        mine = trained(graphs, 12, change)
    assert equal(mine, trained(plain, 12, change))


def hook_on_layer(pipe: pc.Pipeline, seen: list[Any]) -> list[Any]:
    return [pipe.model[0].register_forward_hook(lambda *_: seen.append(1))]


def hook_on_weight(pipe: pc.Pipeline, seen: list[Any]) -> list[Any]:
    hook: Any = lambda weight: seen.append(weight.grad.clone())  # noqa: E731
    return [pipe.model[0].weight.register_post_accumulate_grad_hook(hook)]


def hook_on_node(pipe: pc.Pipeline, seen: list[Any]) -> list[Any]:
    """On autograd's own node, as DistributedDataParallel has it."""
    weight = pipe.model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    return [node.register_hook(lambda *_: seen.append(weight.grad.clone())), node]


@pytest.mark.parametrize(
    ("hook", "reasons"),
    [
        (hook_on_layer, ()),
        (hook_on_weight, ("as long as there are hooks on gradients of weights",)),
        (hook_on_node, ("as long as something holds the autograd node",)),
    ],
)
def test_hooks_are_called_for_each_micro_batch(
    captures: EmulatedCaptures, hook: Callable[..., list[Any]], reasons: tuple[str, ...]
) -> None:
    graphs, plain = both(net())
    found = []
    for pipe in (graphs, plain):
        seen: list[Any] = []
        held: list[Any] = []

        def change(pipe: pc.Pipeline, step: int, seen: list[Any] = seen, held: list[Any] = held) -> None:
            if step == 3:
                held += hook(pipe, seen)
            if step == 5:
                held[0].remove()
                held.clear()

        with told(*(reasons if pipe is graphs else ())):
            own = trained(pipe, 7, change)
        assert len(seen) == 8
        found.append([*own, *(one for one in seen if isinstance(one, Tensor))])
    assert equal(*found)


class Gate(nn.Module):
    """Kept whole, since Python decides by a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.mean() > 0 else x / 2


def waiting(made: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(made, target)
    assert loss.item() > 0
    return loss


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def boxed(made: Tensor, target: Tensor) -> tuple[Tensor, Box]:
    return F.cross_entropy(made, target), Box(made.detach())


@pytest.mark.filterwarnings("ignore:the schedule splits backwards")
@pytest.mark.parametrize(
    ("between", "options", "reason"),
    [
        (Gate, {}, "in stage 0, Python runs in OpaqueModule"),
        (lambda: nn.BatchNorm1d(8), {"batch_norm": "deferred"}, "in stage 0, Python runs in DeferredBatchNorm"),
        (nn.Dropout, {"checkpoint": "always"}, "stage 0 draws random numbers and is recomputed"),
        (nn.Tanh, {"offload": True}, "what forwards save is copied to the host"),
        (nn.Tanh, {"loss_fn": waiting}, "the host waits for _local_scalar_dense"),
        (nn.Tanh, {"loss_fn": boxed, "has_aux": True}, "the step returns a Box"),
        (
            nn.Dropout,
            {"checkpoint": "always", "schedule": "zb-h1"},
            "each computes all gradients of a micro-batch in I",
        ),
    ],
)
def test_a_step_that_cannot_be_one_graph_says_why(
    captures: EmulatedCaptures, between: Callable[[], nn.Module], options: dict[str, Any], reason: str
) -> None:
    results = []
    for pipe in both(net(between()), balance=[2, 3], **options):
        with told(*((reason,) if pipe._options.cuda_graphs else ())):
            own: list[Any] = []
            torch.manual_seed(5)
            for step in range(4):
                made = pipe.step(data(step)[0], target=data(step)[1])
                own.append(made[0] if isinstance(made, tuple) else made)
        results.append([*own, *pipe.buffers(), *(p.grad for p in pipe.parameters() if p.grad is not None)])
    assert equal(*results)


def test_a_capture_that_fails_leaves_the_step_as_it_was(
    captures: EmulatedCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running statistics are updated once, gradients are added once, though the step ran to its end in the capture."""
    graphs, plain = both(net(nn.BatchNorm1d(8)))

    def refuse(*_: object) -> None:
        raise captured_step.UncapturableError("no reason")

    monkeypatch.setattr(captured_step, "_require_copyable", refuse)
    with told("no reason"):
        mine = trained(graphs)
    assert equal(mine, trained(plain))


def test_ctrl_c_within_a_capture_ends_the_step(captures: EmulatedCaptures) -> None:
    steps: list[int] = []

    def loss_fn(made: Tensor, target: Tensor) -> Tensor:
        if len(steps) == 1:
            raise KeyboardInterrupt
        return F.cross_entropy(made, target)

    pipe = compiled(net(), loss_fn=loss_fn)
    pipe.step(data(0)[0], target=data(0)[1])
    before = [p.grad.clone() for p in pipe.parameters()]  # type: ignore[union-attr]
    steps.append(1)
    with told(), pytest.raises(KeyboardInterrupt):
        pipe.step(data(1)[0], target=data(1)[1])
    assert equal([p.grad for p in pipe.parameters()], before)  # type: ignore[misc]
    steps.append(2)
    with told():
        pipe.step(data(1)[0], target=data(1)[1])
    assert captures.replayed == 1


def test_sparse_gradients(captures: EmulatedCaptures) -> None:
    found = []
    for graphs in ("step", False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4))
        pipe, ids = compiled(model, cuda_graphs=graphs), torch.arange(24).reshape(8, 3) % 10
        with told(*(("as long as gradients are sparse",) if graphs else ())):
            own = [pipe.step(ids, target=data(step)[1]) for step in range(3)]
        found.append([*own, *(p.grad.to_dense() for p in pipe.parameters())])  # type: ignore[union-attr]
    assert equal(*found)


def test_stages_on_several_devices_are_captured_one_by_one() -> None:
    pipe = compiled(net(), cuda_graphs=False)
    pipe.step(data(0)[0], target=data(0)[1])
    (executable,) = pipe._cache.latest.executables.values()
    cells, devices = executable.cells, [torch.device("cuda:0"), torch.device("cuda:1")]
    assert step_obstacle(pipe.program, cells, devices[:1] * 2) is None  # type: ignore[arg-type]
    reason = step_obstacle(pipe.program, cells, devices)  # type: ignore[arg-type]
    assert reason == "its stages are on cuda:0, cuda:1, and a graph is captured on one GPU"


def test_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_is_on_ranks", lambda *_: True)
    monkeypatch.setattr(
        compiling.RankMesh, "of", lambda _: SimpleNamespace(devices=["cpu"] * 2, shards=1, as_devices=nullcontext)
    )
    with pytest.raises(
        pc.InputError, match=r'(?s)cuda_graphs="step" is given on ranks.*in the middle.*cuda_graphs=True'
    ):
        compiled(net(), devices=None)


def test_a_capture_that_runs_out_of_memory_says_what_was_predicted(
    captures: EmulatedCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs, plain = both(net())
    monkeypatch.setattr(captured_step, "_require_copyable", refuse)
    with told("out of memory. The graph was predicted to hold "):
        mine = trained(graphs)
    assert equal(mine, trained(plain))


def test_memory_that_the_rehearsal_left_is_given_back_before_the_capture(
    captures: EmulatedCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a capture no memory that torch keeps for others can be freed."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(captures.captured))
    monkeypatch.setattr(step_graphs, "is_accelerator", lambda _: True)
    trained(compiled(net()))
    assert emptied == [0]


def test_threads_are_refused() -> None:
    with pytest.raises(pc.InputError, match=r"(?s)cuda_graphs='step' is given .*dispatch='threads'.*cuda_graphs=True"):
        compiled(net(), dispatch="threads")

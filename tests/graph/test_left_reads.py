"""Python that reads in a forward what other Python of the forward leaves on an object: the two share a stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes, ties_of
from tests.support.eager import accumulate, assert_same
from tests.support.slow_numbers import slow_number

M = 8


class Gate(nn.Module):
    """Kept whole. Reads `note` of the model."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, h):
        is_positive = float(h.detach().sum()) > 0
        return h * (self.owner[0].note + (0.1 if is_positive else 0.2))


class Layers(nn.Module):
    n_stages = 3

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.note: Any = 1.0


class PieceReads(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(self)

    def forward(self, x):
        h = self.first(x)
        self.note = slow_number(x.detach()[0, 0].abs())
        return self.last(self.gate(self.middle(h).tanh()))


class HookReads(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.middle.register_forward_hook(Scale(self))

    def forward(self, x):
        self.note = slow_number(x.detach()[0, 0].abs())
        return self.last(self.middle(self.first(x)).tanh())


class Scale:
    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, _layer, _inputs, output):
        return output * self.owner.note

    def __deepcopy__(self, memo):
        return Scale(copy.deepcopy(self.owner, memo))


class OfTheBatchBefore(PieceReads):
    """The gate reads what the forward of the micro-batch before has left."""

    def forward(self, x):
        h = self.last(self.gate(self.middle(self.first(x)).tanh()))
        self.note = slow_number(x.detach()[0, 0].abs())
        return h


class InDict(PieceReads):
    def __init__(self) -> None:
        super().__init__()
        self.notes = {"scale": 1.0}
        self.gate = DictGate(self.notes)

    def forward(self, x):
        self.notes["scale"] = slow_number(x.detach()[0, 0].abs())
        return self.last(self.gate(self.middle(self.first(x)).tanh()))


class DictGate(nn.Module):
    def __init__(self, notes: dict[str, float]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, h):
        is_positive = float(h.detach().sum()) > 0
        return h * (self.notes["scale"] + (0.1 if is_positive else 0.2))


class InList(PieceReads):
    """A piece appends to a list, whose last item another one reads."""

    n_stages = 2

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []
        self.gate = ListGate(self)

    def forward(self, x):
        h = self.first(x)
        self.note_of(h)
        return self.last(self.gate(self.middle(h).tanh()))

    def note_of(self, h):
        self.notes.append(slow_number(h.detach()[0, 0].abs()))


class ListGate(Gate):
    def forward(self, h):
        is_positive = float(h.detach().sum()) > 0
        return h * (self.owner[0].notes[-1] + (0.1 if is_positive else 0.2))


class RecordedWrite(HookReads):
    """A recorded statement leaves what the hook reads in the forward of the next micro-batch."""

    def forward(self, x):
        h = self.last(self.middle(self.first(x)).tanh())
        self.note = x.detach()[0, :1].abs()
        return h


@pytest.mark.filterwarnings("ignore:samples of a batch meet")
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("kind", [PieceReads, HookReads, OfTheBatchBefore, InDict, InList, RecordedWrite])
def test_steps_equal_the_plain_loop(kind: type[Layers], dispatch: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    other = copy.deepcopy(model)
    x, target = torch.randn(2 * M, 6, dtype=torch.float64), torch.randint(6, (2 * M,))
    pipe = pc.compile(
        model, kind.n_stages, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, schedule="gpipe", cost="analytic",
        dispatch=dispatch,
    )  # fmt: skip
    for _ in range(2):
        pipe.step(x, target=target)
        accumulate(other, x, M, F.cross_entropy, target)
        assert_same(model, other, 1e-12)
        assert torch.equal(torch.as_tensor(model.note), torch.as_tensor(other.note))


class Counted(nn.Sequential):
    """A hook on each layer, which sets what no Python of a forward reads: such layers can be in different stages."""

    def __init__(self, hook: Any) -> None:
        super().__init__(*(nn.Linear(6, 6) for _ in range(4)))
        self.calls, self.latest, self.seen = 0, None, []
        for layer in self:
            layer.register_forward_hook(lambda _layer, _inputs, output: hook(self, output))


def _count(model, _output) -> None:
    model.calls += 1


def _latest(model, output) -> None:
    model.latest = output.detach()


def _append(model, output) -> None:
    model.seen.append(output.detach())


@pytest.mark.parametrize("hook", [_count, _latest, _append])
def test_hooks_that_only_set_do_not_share_a_stage(hook) -> None:
    model, x = Counted(hook), torch.randn(8, 6)
    pipe = pc.compile(model, 4, example_args=(x,), n_microbatches=2, loss_fn=F.cross_entropy, cost="analytic")
    assert [len([n for n in stage.nodes if n in ("_0", "_1", "_2", "_3")]) for stage in pipe.stages] == [1, 1, 1, 1]


class TwoBlocks(Layers):
    """Two blocks kept whole name the same module of torch and the same layer, and call methods that containers have, too."""

    def forward(self, x):
        h = self.first(x)
        h = torch.add(h, self.last.weight.add(1)[0]) if float(h.sum()) > 0 else torch.add(h, self.last.weight.add(2)[0])
        h = self.middle(h).tanh()
        h = torch.sub(h, self.last.weight[0]) if float(h.sum()) > 1 else torch.sub(h, self.last.weight[1])
        return self.last(h)


def test_blocks_that_only_read_do_not_share_a_stage() -> None:
    graph = pc.trace(TwoBlocks(), torch.randn(4, 6))
    kept = [node.name for node in compute_nodes(graph) if "kept" in node.name]
    assert len(kept) == 2
    assert not any(set(kept) <= set(group) for group in ties_of(graph).groups)


def test_the_error_of_a_cut_names_the_attribute() -> None:
    with pytest.raises(pc.PartitionError, match=r"reads 'note', which \w+ leaves on an object"):
        pc.compile(PieceReads(), 6, example_args=(torch.randn(16, 6),), n_microbatches=2, cost="analytic")

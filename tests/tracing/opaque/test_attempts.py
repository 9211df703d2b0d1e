"""Parts that cannot be recorded are one node, and the whole is right: outputs, gradients, buffers, hooks, modes, state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.tracing import trace
from pipecompile.tracing.opaque import attempts
from pipecompile.tracing.recording import record


def names(graph: Any) -> list[str]:
    return [reason.piece.name for reason in graph.facts.kept]


def calls(graph: Any, target: str) -> list[Any]:
    return [node for node in graph.graph.nodes if node.op == "call_module" and node.target == target]


class Around(nn.Module):
    """A linear layer, a part, another linear layer: `join` makes one tensor of what the part gives."""

    def __init__(self, part: nn.Module, join=lambda made: made) -> None:
        super().__init__()
        self.first, self.part, self.last, self.join = nn.Linear(6, 6), part, nn.Linear(6, 3), join

    def forward(self, x):
        return self.last(self.join(self.part(self.first(x))))


class Experts(nn.Module):
    """Each row goes to one of three experts: data-dependent, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        choice, out = weights.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero()[:, 0]
            if len(rows):
                out[rows] = expert(x[rows]) * weights[rows, index, None]
        if self.training:
            self.load += torch.bincount(choice, minlength=3)
        return out


class Branch(nn.Module):
    def forward(self, x):
        return x.relu() if x.sum() > 0 else -x


class Numpy(nn.Module):
    def forward(self, x):
        return x * torch.from_numpy(np.sign(x.detach().numpy()))


class Items(nn.Module):
    def forward(self, x):
        return x * x.max().item() + torch.tensor(x.detach()[:, 0].tolist())[:, None]


class Prints(nn.Module):
    def forward(self, x):
        return x + len(f"{x.mean().item():+.3f}"[:1])


class Rejects(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert type(x) is torch.Tensor
        ctx.scale = float(np.asarray(x.detach()).size)
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


class ThirdParty(nn.Module):
    def forward(self, x):
        return Rejects.apply(x)


def same_step(model: nn.Module, x: torch.Tensor, n_stages: int = 3, parts: int = 2) -> pc.Pipeline:
    """A pipelined step equals eager on the same micro-batches: outputs, loss, gradients, buffers."""
    twin = copy.deepcopy(model)
    pipe = pc.compile(model, n_stages, example_args=(x,), n_microbatches=parts, loss_fn=lambda y: y.square().mean(),
                      cost="analytic", devices=["cpu"] * n_stages)  # fmt: skip
    loss = pipe.step(x)
    expected = 0.0
    for part in torch.tensor_split(x, parts):
        mine = twin(part).square().mean() * (len(part) / len(x))
        mine.backward()
        expected += mine.detach()
    torch.testing.assert_close(loss, torch.as_tensor(expected))
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    return pipe


@pytest.mark.parametrize("part", [Experts, Branch, Numpy, Items, Prints, ThirdParty], ids=lambda kind: kind.__name__)
def test_a_part_that_cannot_be_recorded_is_one_node_and_right(part):
    torch.manual_seed(0)
    model = Around(part())
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["part"] or part is ThirdParty
    assert len(calls(graph, "part")) <= 1
    for size in (1, 3, 7):
        x = torch.randn(size, 6)
        assert torch.equal(graph(x), model(x))
    same_step(model, torch.randn(8, 6))


def test_nothing_of_the_model_or_the_thread_changes():
    model = Around(Experts()).train()
    model.part.cache = seen = []
    model.part.register_forward_hook(lambda module, given, made: module.cache.append(made))
    before = copy.deepcopy(model.state_dict())
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    torch.manual_seed(5)
    state, x = torch.get_rng_state(), torch.randn(4, 6)
    torch.manual_seed(5)
    trace(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.part.cache is seen
    assert not seen
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers())] == versions
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Nest:
    def __init__(self, rows, extra) -> None:
        self.rows, self.extra = rows, extra


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        if x.sum() > 1e9:
            return None
        y = x * self.scale
        return {"pair": (y, [y.detach() * 2, "word"]), "nest": Nest(y + 1, {"n": 3}), "none": None, "scale": self.scale}


def test_results_of_any_structure():
    def join(made):
        assert made["pair"][1][1] == "word"
        assert made["none"] is None
        return made["pair"][0] + made["pair"][1][0] + made["nest"].rows * made["nest"].extra["n"] + made["scale"]

    model = Around(Nested(), join)
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["part"]
    x = torch.randn(5, 6)
    assert torch.equal(graph(x), model(x))
    same_step(model, torch.randn(8, 6))


class Takes(nn.Module):
    def forward(self, nest, *, factor):
        return nest.rows * factor["by"] if nest.rows.sum() > 0 else nest.rows


class GivesObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.takes = nn.Linear(6, 6), Takes()

    def forward(self, x):
        y = self.first(x)
        return self.takes(Nest(y, len(x)), factor={"by": y.mean()})


def test_objects_with_tensors_as_arguments():
    model = GivesObjects()
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["takes"]
    for size in (2, 6):
        x = torch.randn(size, 6)
        assert torch.equal(graph(x), model(x))
    same_step(model, torch.randn(8, 6), n_stages=2)


def test_the_smallest_part_is_kept_and_the_rest_is_cut():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.choose, self.down = nn.Linear(6, 6), Branch(), nn.Linear(6, 6)

        def forward(self, x):
            return self.down(self.choose(self.up(x)))

    model = nn.Sequential(*(Block() for _ in range(3)))
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["0.choose", "1.choose", "2.choose"]
    assert {"0.up", "0.down", "2.down"} <= {node.target for node in graph.graph.nodes}
    same_step(model, torch.randn(8, 6))


def test_a_method_is_kept_when_no_submodule_is_as_small():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = nn.Linear(6, 6), nn.Parameter(torch.full((6,), 2.0))

        def select(self, y):
            return y[y.sum(1) > 0] * self.scale

        def forward(self, x):
            return self.select(self.body(x)).square().sum()

    model, original = Head(), Head.select
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["select"]
    assert Head.select is original
    x = torch.randn(9, 6)
    ours, theirs = graph(x), model(x)
    assert torch.equal(ours, theirs)
    gradients = torch.autograd.grad(ours, tuple(model.parameters()))
    assert all(map(torch.equal, gradients, torch.autograd.grad(theirs, tuple(model.parameters()))))
    used = dict(calls(graph, "select")[0].graph.owning_module.named_parameters())
    assert any(parameter is model.scale for parameter in used.values())


def test_what_cannot_be_foretold_is_kept_in_a_larger_part():
    class Peak(nn.Module):
        def forward(self, x):
            return float(x.max())

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peak = Peak()

        def forward(self, x):
            return x / self.peak(x.detach())

    model = Around(Scale())
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["part"]
    x = torch.randn(6, 6)
    assert torch.equal(graph(x), model(x))


def test_a_value_from_elsewhere_goes_with_the_part_that_made_it():
    class Writer(nn.Module):
        def forward(self, x, store):
            store["seen"] = x * 2
            return x

    class Reader(nn.Module):
        def __init__(self, store) -> None:
            super().__init__()
            self.store = store

        def forward(self, x):
            return x + self.store["seen"] if x.sum() > 0 else x - self.store["seen"]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.store = {}
            self.writer, self.reader = Writer(), Reader(self.store)

        def forward(self, x):
            return self.reader(self.writer(x, self.store))

    model = Around(Both())
    graph = trace(model, torch.randn(4, 6))
    assert names(graph) == ["part"]
    x = torch.randn(6, 6)
    assert torch.equal(graph(x), model(x))
    assert not model.part.store or model.part.store["seen"].shape == (6, 6)


def test_called_twice_with_state_stays_in_one_stage():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.mid, self.last = Experts(), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.experts(self.mid(self.experts(x))))

    model = Twice()
    pipe = same_step(model, torch.randn(8, 6), n_stages=2)
    assert len(calls(pipe.graph, "experts")) == 2
    assert len({pipe.plan.stage_of[node.name] for node in calls(pipe.graph, "experts")}) == 1


def test_modes_hooks_and_frozen_parameters():
    model = Around(Experts())
    model.part.experts[0].requires_grad_(requires_grad=False)
    model.part.register_forward_hook(lambda module, given, made: made * 2)
    pipe = same_step(model, torch.randn(8, 6))
    counted = model.part.load.clone()
    pipe.eval()
    x = torch.randn(8, 6)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x))
    assert torch.equal(model.part.load, counted)
    pipe.train().step(x)
    assert model.part.load.sum() == counted.sum() + 8


def test_regions_around_and_views_of_what_goes_in():
    class Views(nn.Module):
        def forward(self, x):
            return x.view(len(x), 2, 3) if x.sum() > -1e9 else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.views, self.last = nn.Linear(6, 6), Views(), nn.Linear(6, 2)

        def forward(self, x):
            y = self.first(x)
            z = self.views(y)
            z += 1
            with torch.no_grad():
                shift = self.views(y).sum(2)
            return self.last(y) + shift

    model = Model()
    graph = trace(model, torch.randn(4, 6))
    x = torch.randn(5, 6)
    assert torch.equal(graph(x), model(x))
    same_step(model, torch.randn(8, 6), n_stages=2)


def test_sizes_that_the_data_decide_are_read_where_they_are_needed():
    class Positive(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.positive, self.last = nn.Linear(6, 6), Positive(), nn.Linear(6, 2)

        def forward(self, x):
            rows = self.positive(self.first(x))
            padded = torch.cat([self.last(rows), torch.ones(len(rows), 2)], 1)
            return padded.sum(0) * len(rows) + len(x)

    torch.manual_seed(0)
    model = Model()
    graph = trace(model, torch.randn(8, 6))
    for size in (3, 8, 20):
        x = torch.randn(size, 6)
        assert torch.equal(graph(x), model(x))
    same_step(model, torch.randn(8, 6), n_stages=3, parts=1)


@pytest.mark.parametrize("by_column", [False, True])
def test_an_output_whose_size_the_data_decide_is_computed_on_the_whole_mini_batch(by_column):
    class Positive(nn.Module):
        def forward(self, x):
            x = x.t() if by_column else x
            return x[x > 0]

    model = nn.Sequential(nn.Linear(6, 6), Positive())
    x = torch.randn(8, 6)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    for count in (1, 2):
        output = pc.compile(model, 2, example_args=(x,), n_microbatches=count, cost="analytic")(x)
        torch.testing.assert_close(output, expected)
        model.zero_grad()
        output.square().sum().backward()
        assert all(map(torch.allclose, gradients, [parameter.grad for parameter in model.parameters()]))


def test_a_part_whose_results_are_as_many_as_samples_fixes_the_batch():
    class Split(nn.Module):
        def forward(self, x):
            return [row * row.max().item() for row in x]

    model = Around(Split(), torch.stack)
    graph = trace(model, torch.randn(4, 6))
    assert graph.facts.batch_size == 4
    x = torch.randn(4, 6)
    assert torch.equal(graph(x), model(x))
    same_step(model, torch.randn(8, 6))


def test_costs_of_a_kept_part_are_known_without_running_it():
    model = Around(Experts())
    x = torch.randn(4, 6)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=1, cost="analytic")
    part = next(node for node in pipe.problem.nodes if node.name == "part")
    layer = next(node for node in pipe.problem.nodes if node.name == "first")
    assert part.time > layer.time
    assert part.activation > 0
    held = [*model.part.parameters()]
    assert part.bytes == sum(2 * p.nbytes for p in held) + model.part.load.nbytes


def detector(kind: str, train: bool) -> nn.Module:
    detection = pytest.importorskip("torchvision.models.detection")
    anchors = detection.anchor_utils.AnchorGenerator(((16, 32),), ((1.0,),))
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
    )
    body.out_channels = 8
    options = {"num_classes": 3, "min_size": 64, "max_size": 64}
    if kind == "FasterRCNN":
        pool = detection.faster_rcnn.MultiScaleRoIAlign(["0"], 3, 2)
        head = detection.faster_rcnn.TwoMLPHead(8 * 9, 16)
        predictor = detection.faster_rcnn.FastRCNNPredictor(16, 3)
        options |= {"box_head": head, "box_predictor": predictor, "num_classes": None, "rpn_anchor_generator": anchors}
        return detection.FasterRCNN(body, box_roi_pool=pool, **options).train(train)
    return getattr(detection, kind)(body, anchor_generator=anchors, **options).train(train)


@pytest.mark.parametrize("kind", ["FasterRCNN", "RetinaNet"])
def test_detection_models_are_cut_around_their_heads(kind):
    torch.manual_seed(0)
    model = detector(kind, train=False)
    images = [torch.rand(3, 64, 64), torch.rand(3, 64, 80)]
    pipe = pc.compile(model, 3, n_microbatches=1, batch_dims={"images": None}, cost="analytic", schedule="gpipe")
    with torch.no_grad():
        ours, theirs = pipe(images), model(images)
    assert len(ours) == 2
    assert all(map(torch.equal, pytree.tree_leaves(ours), pytree.tree_leaves(theirs)))
    assert names(pipe.graph)
    assert set(pipe.plan.stage_of.values()) == {0, 1, 2}


def test_detection_models_train():
    """They check their targets, and give a dict of losses."""
    torch.manual_seed(0)
    model = detector("RetinaNet", train=True)
    twin = copy.deepcopy(model)
    images = [torch.rand(3, 64, 64), torch.rand(3, 64, 80)]
    boxes = [torch.tensor([[4.0, 4, 40, 40], [10, 10, 50, 60]]), torch.tensor([[4.0, 8, 40, 60]])]
    targets = [{"boxes": b, "labels": torch.arange(len(b)) % 2 + 1} for b in boxes]
    shared = {"images": None, "targets": None}
    pipe = pc.compile(
        model, 2, n_microbatches=1, batch_dims=shared, cost="analytic", loss_fn=lambda losses: sum(losses.values())
    )
    pipe._cache.find(pipe._flatten((images, targets), {}))
    torch.manual_seed(1)
    loss = pipe.step(images, targets)
    torch.manual_seed(1)
    expected = sum(twin(images, targets).values())
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_part_that_reads_gradients_of_its_buffers_is_kept_whole():
    """Codebooks that keep sums of updates in `.grad` of a buffer (vector-quantize-pytorch) were refused."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            new = x.detach().mean(0)
            if self.mean.grad is not None:
                new, self.mean.grad = new + self.mean.grad, None
            self.mean.lerp_(new, 0.5)
            return x - self.mean

    torch.manual_seed(0)
    model = Around(Codebook())
    same_step(model, torch.randn(8, 6), n_stages=3, parts=2)
    assert [reason.piece.name for reason in trace(model, torch.randn(4, 6)).facts.kept] == ["part"]


def test_a_later_recording_begins_with_the_modules_of_the_first(monkeypatch):
    runs, plain = [], attempts.run_trial
    monkeypatch.setattr(attempts, "run_trial", lambda *args, **options: runs.append(1) or plain(*args, **options))
    model = nn.Sequential(Around(Branch()), nn.Linear(3, 6), Around(Items()), nn.Linear(3, 6), Around(Numpy()))
    inputs = flatten(model.forward, (torch.randn(4, 6),), {}, None)
    first = record(model, inputs)
    alone, _ = len(runs), runs.clear()
    second = record(model, inputs, kept=first.facts.kept)
    assert names(second) == names(first) == ["0.part", "2.part", "4.part"]
    assert len(runs) * 3 <= alone
    model[0] = nn.Linear(6, 3)  # one of them is gone: the recording begins without any
    assert names(record(model, inputs, kept=first.facts.kept)) == ["2.part", "4.part"]


def test_a_part_that_reads_the_version_of_a_weight_is_kept_whole():
    """The version of the recording was a constant in every step."""

    class Versioned(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + 0.01 * self.weight._version)

    torch.manual_seed(0)
    model, x = Around(Versioned(6, 6)), torch.randn(8, 6)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", devices=["cpu"] * 2).eval()
    assert [reason.piece.name for reason in pipe.graph.facts.kept] == ["part"]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
            model.part.weight.mul_(0.5)


class LeavesAux(nn.Module):
    """Kept whole, because it branches on a value; leaves a number on itself that the model around it reads."""

    def __init__(self, aux: float | None) -> None:
        super().__init__()
        self.layer, self.aux = nn.Linear(4, 4), aux

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            x = x + 1
        self.aux = x.square().mean().item()
        return self.layer(x)


class ReadsAux(nn.Module):
    def __init__(self, aux: float | None) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(4, 4), LeavesAux(aux)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.experts(self.first(x))
        return made + self.experts.aux * 1.0


@pytest.mark.parametrize("aux", [None, 0.0], ids=["none", "zero"])
def test_a_read_of_a_number_that_a_kept_part_leaves_is_refused_with_its_name(aux):
    x = torch.randn(8, 4)

    with pytest.raises(pc.PipecompileError, match=r"experts.* kept whole") as caught:
        pc.compile(ReadsAux(aux), 2, example_args=(x,), n_microbatches=2, cost="analytic")(x)

    assert "return" in str(caught.value.args[0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory, self.head = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rnn = nn.utils.rnn
        packed = rnn.pack_padded_sequence(self.table(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)
        return self.head(made.amax(1))


class Appends(nn.Module):
    def forward(self, x, found):
        found.append(float(x.max()))
        return x


class ReadsFound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Appends()

    def forward(self, x):
        found = []
        return self.part(self.first(x), found) * found[0]


def test_what_to_try_is_about_the_reason_why_a_part_cannot_be_kept():
    with pytest.raises(
        pc.TraceError, match=r"(?s)PC111.*part: it changes a list.*try    return .* what it puts into its arg"
    ):
        trace(ReadsFound(), torch.randn(4, 8))


def test_a_length_that_the_data_decide_is_refused_with_what_fixes_it():
    x, lengths = torch.randint(10, (8, 6)), torch.tensor([5, 3, 2, 5, 1, 4, 6, 2])

    with pytest.raises(pc.PipecompileError, match="the data decide the sizes of its result") as caught:
        pc.compile(Packed(), 2, example_args=(x, lengths), n_microbatches=4, cost="analytic")(x, lengths)

    assert "total_length" in str(caught.value.args[0])


def test_rows_that_labels_pick_are_as_many_as_the_data_decide_even_if_each_sample_of_the_example_has_one():
    """They were taken to be as many as samples, and the step failed in the first micro-batch in which they were not."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.point = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

        def forward(self, x, labels):
            x = self.first(x)
            x[labels == 1] += self.point
            return x

    model = Prompted()
    x, labels = torch.randn(4, 3, 6), torch.randint(0, 2, (4, 3))
    graph = trace(model, torch.randn(4, 3, 6), torch.tensor([[1, 0, 0]] * 4))
    assert torch.equal(graph(x, labels), model(x, labels))


def test_a_part_with_batch_norm_is_right_for_any_batch_if_the_example_has_two_samples():
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return self.norm(x) if float(x.sum()) < 1e9 else x

    graph = trace(nn.Sequential(nn.Linear(6, 6), Decides(), nn.Linear(6, 6)), torch.randn(2, 6))
    assert graph.facts.batch_size is None


class Queue(nn.Module):
    """A queue of keys, as of MoCo: a bare conversion of a buffer is the index of a later statement."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = self.first(x)
        similar = self.last(keys) @ self.queue.clone().t()
        with torch.no_grad():
            place = int(self.place)
            self.queue[place : place + len(x)] = keys
            place = (place + len(x)) % 8
            self.place[0] = place
        return similar[:, :4]


def test_a_number_of_a_buffer_that_the_call_changes_is_no_constant():
    model, eager = Queue(), Queue()
    eager.load_state_dict(model.state_dict())
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=nn.functional.mse_loss, cost="analytic")
    for _ in range(3):
        x = torch.randn(4, 4)
        pipe.step(x, target=x)
        for part in x.chunk(2):
            eager(part)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert pipe.explain().traces == 1


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.layer = 0, nn.Linear(4, 4)

    def forward(self, x):
        self.calls += 1
        return self.layer(x), self.calls


class DividedByCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbered, self.last = Numbered(), nn.Linear(4, 4)

    def forward(self, x):
        x, calls = self.numbered(x)
        return self.last(x) / calls


def test_a_piece_whose_number_each_call_changes_is_refused_before_a_step():
    with pytest.raises(
        pc.TraceError, match=r"numbered: it returns a value of type int that depends on .* earlier calls"
    ):
        pc.trace(DividedByCalls(), torch.randn(2, 4))


class Mixed(nn.Module):
    """Mixup: what a Beta distribution draws, by an operator for which torch has no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = torch.distributions.Beta(0.4, 0.4).sample((len(x),))
        mixed = shares[:, None] * x
        return self.b(self.a(mixed).relu())


def test_statements_around_an_operator_without_a_shape_are_kept_whole() -> None:
    """Statements of the whole model's forward were not kept: PC199 for every model that draws from Beta or Dirichlet."""
    model = Mixed()
    found = pc.explain(model, torch.rand(8, 4))
    assert [part.code for part in found.kept_whole] == ["PC199"]
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=nn.functional.mse_loss, cost="analytic")
    x, target = torch.rand(8, 4), torch.rand(8, 4)
    torch.manual_seed(0)
    loss = pipe.step(x, target=target)
    torch.manual_seed(0)
    parts = zip(x.chunk(2), target.chunk(2), strict=True)
    assert torch.equal(loss, sum(nn.functional.mse_loss(model(one), two).detach() / 2 for one, two in parts))

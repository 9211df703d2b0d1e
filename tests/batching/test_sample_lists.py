"""Lists with an entry per sample: shared out by entries, and outputs with an entry per sample put together again."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import assert_same

LISTS = {"images": list, "targets": list}


class Detector(nn.Module):
    """Like those of torchvision: stacks its images, gives losses in training and an entry per image in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.scores, self.boxes = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, images: list[torch.Tensor], targets: Any = None, scale: Any = None) -> Any:
        h = self.body(torch.stack(images)).mean((2, 3))
        h = h if scale is None else h * scale
        scores, boxes = self.scores(h), self.boxes(h)
        if targets is None:
            return [{"scores": s, "boxes": b} for s, b in zip(scores, boxes, strict=True)]
        wanted = torch.stack([target["boxes"] for target in targets])
        return {"boxes": (boxes - wanted).abs().mean(), "scores": scores.square().mean()}


def test_lists_that_are_not_declared_are_named() -> None:
    """The text took channels for samples, and proposed to share or to split boxes."""
    with pytest.raises(
        pc.InputError, match=r'try    batch_dims=\{"images": list, "targets": list\}, if there is an entry per sample'
    ):
        pc.compile(Detector(), 2, example_args=batch(4), loss_fn=total, devices=["cpu"] * 2)
    with pytest.raises(pc.InputError) as caught:
        pc.compile(nn.Bilinear(2, 2, 2), 2, example_args=(torch.zeros(4, 2), torch.zeros(3, 2)), devices=["cpu"] * 2)
    assert "list" not in caught.value.hint


def batch(n: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    return [torch.randn(3, 8, 8) for _ in range(n)], [{"boxes": torch.randn(4)} for _ in range(n)]


def total(losses: Any) -> torch.Tensor:
    return sum(losses.values())


def compiled(model: nn.Module, count: int, **options: Any) -> pc.Pipeline:
    return pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=count, loss_fn=total, batch_dims=LISTS, **options
    )


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_training_equals_the_plain_loop(dispatch: str) -> None:
    torch.manual_seed(0)
    model = Detector()
    eager = copy.deepcopy(model)
    pipe = compiled(model, 3, dispatch=dispatch)
    for samples in (6, 3):
        images, targets = batch(samples)
        loss, size = pipe.step(images, targets), samples // 3
        parts = [total(eager(images[i : i + size], targets[i : i + size])) for i in range(0, samples, size)]
        (sum(parts) / 3).backward()
        torch.testing.assert_close(loss, sum(parts).detach() / 3)
        assert_same(model, eager, tolerance=1e-6)
    assert len(pipe.explain().kept) == 2


def test_an_output_with_an_entry_per_sample_has_all_of_them() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    pipe, (images, _) = compiled(model, 3), batch(6)
    made, wanted = pipe(images), model(images)
    assert [sorted(entry) for entry in made] == [sorted(entry) for entry in wanted]
    for ours, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.stack([entry["boxes"] * (i + 1) for i, entry in enumerate(made)]).sum().backward()
    mine = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.stack([entry["boxes"] * (i + 1) for i, entry in enumerate(wanted)]).sum().backward()
    torch.testing.assert_close(mine, [p.grad for p in model.parameters()])


def test_losses_of_a_call_are_averaged() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    pipe, (images, targets) = compiled(model, 2), batch(4)
    with torch.no_grad():
        torch.testing.assert_close(pipe(images, targets), model(images, targets))


def test_every_entry_and_every_shared_input_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    pipe, (images, targets) = compiled(model, 2), batch(4)
    leaves = [*images, torch.rand(4, 1), torch.rand(1, 4)]
    for shared in leaves[4:]:
        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_()
        total(pipe(images, targets, scale=shared)).backward()
        mine = [leaf.grad for leaf in (*images, shared)]
        for leaf in leaves:
            leaf.grad = None
        pipe.step(images, targets, scale=shared)
        stepped = [leaf.grad for leaf in (*images, shared)]
        for leaf in leaves:
            leaf.grad = None
        total(model(images, targets, scale=shared)).backward()
        torch.testing.assert_close(mine, [leaf.grad for leaf in (*images, shared)])
        torch.testing.assert_close(stepped, mine)


def test_lists_go_into_equal_micro_batches_and_one_warning_says_so() -> None:
    pipe = compiled(Detector(), 4, batch_norm="each")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe.step(*batch(6))
        pipe.step(*batch(6))
    text, of_loss = [str(one.message) for one in told if one.category is pc.RecordingWarning]
    assert "6 samples go into 3 micro-batches instead of 4" in text
    assert "not recognised as a mean or a sum" in of_loss  # what the losses in the model divide by is not known


def test_a_target_may_be_such_a_list() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, target = torch.randn(5, 3), [torch.randn(2, dtype=torch.float32) for _ in range(5)]

    def loss_fn(out: torch.Tensor, wanted: list[torch.Tensor]) -> torch.Tensor:
        return (out - torch.stack(wanted)).square().mean()

    pipe = pc.compile(model, 2, cost="analytic", n_microbatches=2, loss_fn=loss_fn, batch_dims={"target": list})
    torch.testing.assert_close(pipe.step(x, target=target), loss_fn(model(x), target).detach())
    with pytest.raises(pc.InputError, match="it has 4 entries for 5 samples"):
        pipe.step(x, target=target[:4])


def unlike(images: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*images[:3], torch.randn(3, 8, 9)]


MISTAKES = {
    "entries of other shapes": (
        lambda i, t: (unlike(i), t),
        r"images_1 is .*\(3, 8, 8\) in micro-batch 0, .*\(3, 8, 9\)",
    ),
    "lists of other lengths": (
        lambda i, t: (i, t[:3]),
        r'(?s)images: 4, targets: 3.*batch_dims={"targets": None} for what all',
    ),
    "no list": (
        lambda i, t: (torch.stack(i), t),
        "declares images as a list with one entry per sample, but images is a Tensor",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors(mistake: str) -> None:
    change, text = MISTAKES[mistake]
    with pytest.raises(pc.InputError, match=text):
        compiled(Detector(), 2).step(*change(*batch(4)))


def test_only_an_argument_can_be_a_list_of_samples() -> None:
    with pytest.raises(pc.InputError, match="is not a whole argument"):
        pc.compile(Detector(), 2, batch_dims={"targets_0": list})


def test_the_option_is_in_the_message_when_lists_are_cut_along_a_tensor() -> None:
    class Picky(Detector):
        def forward(self, images: list[torch.Tensor], targets: Any = None, scale: Any = None) -> Any:
            return super().forward([image - torch.zeros(3, 1, 1) for image in images], targets, scale)

    images, _ = batch(4)
    with pytest.raises(pc.TraceError, match=r'batch_dims=\{"images": list\}'):
        pc.compile(Picky(), 2, n_microbatches=2, loss_fn=total, cost="analytic").step(images)

"""`across_batch="exact"`: the loss and its gradients are those of the mini-batch, where samples of all micro-batches meet."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import DetachedLossError, InputError, RecordingWarning, ScheduleError


def contrastive(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ other.T, torch.arange(len(output)))


class Body(nn.Module):
    """Layers whose samples do not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class Meeting(Body):
    """A softmax over the batch, with a layer behind."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).softmax(0))


class TwoTowers(nn.Module):
    """Its own loss, over all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Body(), Body()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.scale * self.left(x) @ self.right(y).T
        labels = torch.arange(len(x))
        return {"loss": F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels), "left": self.left(x)}


class Noisy(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layers(x).softmax(0), 0.5, self.training)


def compiled(model: nn.Module, *args: torch.Tensor, **options: Any) -> pc.Pipeline:
    given = {"n_microbatches": 4, "schedule": "gpipe", "across_batch": "exact", "devices": ["cpu"] * 3, **options}
    return pc.compile(model, 3, example_args=args, cost="analytic", **given)


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 8, dtype=torch.float64)


def assert_same_gradients(model: nn.Module, eager: nn.Module) -> None:
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)  # micro-batches are added apart


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [Body, Meeting])
@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "always"}, {"dispatch": "threads"}, {"n_microbatches": 1}], ids=str
)
def test_a_loss_over_pairs_of_samples_is_that_of_the_mini_batch(model: type[Body], options: dict[str, Any]) -> None:
    own = model().double()
    eager = copy.deepcopy(own)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss was not recognised")
        pipe = compiled(own, rows(), loss_fn=contrastive, **options)
        for count in (8, 7, 8):  # gradients of three steps are added up
            x, y = rows(count), rows(count)
            loss = contrastive(eager(x), y)
            loss.backward()
            torch.testing.assert_close(pipe.step(x, target=y), loss.detach(), rtol=1e-12, atol=0)
    assert_same_gradients(own, eager)


def test_in_micro_batches_the_loss_is_another_one_and_a_warning_says_what_to_write() -> None:
    own = Body().double()
    pipe = compiled(own, rows(), loss_fn=contrastive, across_batch=None)
    x, y = rows(), rows()
    with pytest.warns(RecordingWarning, match='across_batch="exact"'):
        loss = pipe.step(x, target=y)
    assert not torch.allclose(loss, contrastive(own(x), y))


def test_a_loss_of_the_model_is_computed_once_and_the_inputs_get_their_gradients() -> None:
    own = TwoTowers().double()
    eager = copy.deepcopy(own)
    pipe = compiled(own, rows(), rows())
    x, y = rows().requires_grad_(), rows()
    other = x.detach().clone().requires_grad_()
    loss = eager(other, y)["loss"]
    loss.backward()
    torch.testing.assert_close(pipe.step(x, y), loss.detach(), rtol=1e-12, atol=0)
    assert_same_gradients(own, eager)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_without_gradients_the_loss_is_computed_and_gradients_stay() -> None:
    own = Body().double()
    pipe = compiled(own, rows(), loss_fn=contrastive)
    x, y = rows(), rows()
    with torch.no_grad():
        torch.testing.assert_close(pipe.step(x, target=y), contrastive(own(x), y))
    assert all(parameter.grad is None for parameter in own.parameters())
    result = pipe.evaluate([(x, y)])
    assert result.loss == pytest.approx(contrastive(own(x), y).item())


def test_the_auxiliary_value_is_that_of_the_mini_batch_and_a_scaler_scales_the_gradients() -> None:
    own = Body().double()
    eager = copy.deepcopy(own)
    pipe = compiled(own, rows(), loss_fn=lambda output, y: (contrastive(output, y), output), has_aux=True)
    x, y = rows(), rows()
    (contrastive(eager(x), y) * 4).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss, aux = pipe.step(x, target=y, scaler=scaler)
    torch.testing.assert_close(loss, contrastive(eager(x), y).detach())
    torch.testing.assert_close(aux, [eager(x).detach()])
    assert not aux[0].requires_grad
    assert_same_gradients(own, eager)


def test_the_program_before_a_step_is_the_one_that_runs() -> None:
    pipe = compiled(Body().double(), rows(), loss_fn=contrastive)
    before = str(pipe.program)
    pipe.step(rows(), target=rows())
    assert str(pipe.program) == before
    assert len(pipe.measured.spans) == 3 * 4 * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "auto"])
def test_schedules_with_a_backward_before_the_last_forward_are_refused(schedule: str) -> None:
    with pytest.raises(ScheduleError, match=r'(?s)across_batch="exact" is given.*try.*schedule="gpipe"'):
        compiled(Body(), torch.randn(8, 8), loss_fn=contrastive, schedule=schedule)


def test_draws_behind_the_line_where_samples_meet_are_refused_with_that_line() -> None:
    pipe = compiled(Noisy().double(), rows(), loss_fn=F.mse_loss)
    with pytest.raises(InputError, match=r"(?s)test_whole_batch_steps.py:\d+.*random numbers"):
        pipe.step(rows(), target=rows())


def test_lists_and_packed_sequences_are_refused() -> None:
    pipe = compiled(Body().double(), rows(), loss_fn=contrastive)
    with pytest.raises(InputError, match="no order of samples"):
        pipe.step(microbatches=[(rows(2), rows(2))])
    with pytest.raises(InputError, match="together with split"):
        compiled(Body().double(), rows(), loss_fn=contrastive, split={"x": "offsets"})


def test_a_missing_target_and_a_loss_without_gradient_are_the_errors_of_any_step() -> None:
    pipe = compiled(Body().double(), rows(), loss_fn=contrastive)
    with pytest.raises(InputError, match="takes a target"):
        pipe.step(rows())
    frozen = compiled(Body().double().requires_grad_(requires_grad=False), rows(), loss_fn=contrastive)
    with pytest.raises(DetachedLossError):
        frozen.step(rows(), target=rows())
    with pytest.raises(InputError, match="needs a loss"):
        compiled(Body().double(), rows()).step(rows())


def test_a_softmax_over_the_batch_before_the_output_is_told_with_its_line() -> None:
    pipe = compiled(Meeting().double(), rows(), loss_fn=F.mse_loss, across_batch=None)
    with pytest.warns(RecordingWarning, match=r"meet at test_whole_batch_steps.py:\d+.*across_batch=\"exact\"") as told:
        pipe.step(rows(), target=rows())
    assert len(told) == 1
    known = compiled(Meeting().double(), rows(), loss_fn=F.mse_loss, across_batch="each")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known.step(rows(), target=rows())


class Leaving(Body):
    """Leaves what it computes on itself."""

    left: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.left = self.layers[0](x)
        return self.layers[1:](self.left)


def test_a_loss_that_may_read_what_the_last_micro_batch_left_is_warned_of() -> None:
    """Its value was computed with the last micro-batch's, without a word; a gradient through that is refused."""
    model = Leaving().double()
    pipe = compiled(model, rows(), loss_fn=lambda y, other: contrastive(y, other) + model.left.detach().square().mean())
    with pytest.warns(RecordingWarning, match="of the last micro-batch alone"):
        pipe.step(rows(), target=rows())
    trained = compiled(model, rows(), loss_fn=lambda y, other: contrastive(y, other) + model.left.square().mean())
    with pytest.warns(RecordingWarning, match="alone"), pytest.raises(InputError, match="has no gradient"):
        trained.step(rows(), target=rows())


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8)], ids=["draws", "changes state"])
def test_a_step_that_cannot_join_the_output_says_so_of_the_step(layer: nn.Module) -> None:
    """The text was that of a call, which said that steps were not concerned."""

    class Behind(Body):
        def __init__(self) -> None:
            super().__init__()
            self.behind = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.behind(self.layers(x).softmax(0))

    pipe = pc.compile(
        Behind(), 2, n_microbatches=4, schedule="gpipe", across_batch="exact", loss_fn=F.mse_loss, cost="analytic"
    )
    with pytest.raises(InputError, match='a step with across_batch="exact" needs the whole output') as caught:
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    assert "not concerned" not in str(caught.value)
    assert 'across_batch="each"' in caught.value.hint

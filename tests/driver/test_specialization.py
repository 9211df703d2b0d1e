"""A specialization: the calls that it serves, its cut for other recordings, its inputs, and what a step needs of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.specialization import Specialization
from tests.support.compilations import layers, mini_batch, options_of, specialized


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if x.shape[0] > 1 else x


@pytest.fixture(scope="module")
def compiled() -> Specialization:
    return specialized(Branch(), samples=6)


@pytest.fixture
def own(compiled: Specialization) -> Specialization:
    """A copy that a test may change."""
    return replace(compiled, executables=dict(compiled.executables), schedules=dict(compiled.schedules))


def test_a_call_is_served_if_its_signature_and_all_its_sizes_suit(compiled: Specialization) -> None:
    assert compiled.accepts(compiled.signature, (2, 3, 9))
    assert not compiled.accepts(compiled.signature, (2, 1))
    assert not compiled.accepts((*compiled.signature, 1), (2,))


def test_a_recording_for_one_grad_mode_serves_no_other(own: Specialization) -> None:
    own.facts = replace(own.facts, grad_mode=True)
    assert own.accepts(own.signature, (2,))
    with torch.no_grad():
        assert not own.accepts(own.signature, (2,))


def test_the_guard_that_fails_is_named(compiled: Specialization) -> None:
    assert compiled.broken_guard((2, 3)) is None
    assert str(compiled.broken_guard((3, 1))) == "batch_size > 1"


def test_the_cut_has_the_stage_of_every_node(compiled: Specialization) -> None:
    assert compiled.cut.n_stages == 2
    assert compiled.cut.on(compiled.graph) == {"a": 0, "b": 1}


def test_inputs_arrive_in_micro_batches_and_are_no_gradients(compiled: Specialization) -> None:
    x = torch.randn(5, 4)
    ((name, is_gradient), parts), *others = compiled.arrivals(mini_batch(Branch(), 2, x)).items()
    assert (name, is_gradient, others) == ("x", False, [])
    assert [len(part) for part in parts] == [3, 2]
    assert torch.equal(torch.cat(tuple(parts)), x)


def test_stages_are_compiled_once_and_only_on_request(compiled: Specialization) -> None:
    assert len(compiled.codes) == 2
    assert compiled.codes is compiled.codes


def test_copies_on_the_cpu_do_not_overlap(compiled: Specialization) -> None:
    assert not compiled.is_overlapped


def test_the_row_of_the_report_has_the_time_of_recording_and_the_calls(own: Specialization) -> None:
    own.calls = 3
    row = own.report()
    assert (row.seconds, row.calls, row.mode) == (own.log.seconds["record"], 3, "train")


def test_other_options_drop_programs_and_schedules(own: Specialization) -> None:
    own.executables["step", 2, False] = object()  # type: ignore[assignment]
    own.schedules[2] = pc.build_schedule("gpipe", 2, 2)
    own.plan = replace(own.plan, recompute=(True, False))
    own.reschedule(options_of(checkpoint="auto", schedule="gpipe"))
    assert not own.executables
    assert not own.schedules
    assert (own.options.schedule, own.options.checkpoint) == ("gpipe", (True, False))


def test_a_step_needs_a_loss_and_the_target_that_the_loss_takes(own: Specialization) -> None:
    own.options = options_of(loss_fn=nn.functional.mse_loss)
    with pytest.raises(pc.InputError, match="loss_fn takes a target"):
        own.require_loss(with_target=False)
    own.require_loss(with_target=True)
    own.options = options_of(loss_fn=torch.Tensor.mean)
    own.require_loss(with_target=False)
    own.options = options_of(loss_fn=None)
    with pytest.raises(pc.InputError, match="step needs a loss"):
        own.require_loss(with_target=True)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean()


def test_a_scalar_output_is_a_loss() -> None:
    specialized(OwnLoss(), loss_fn=None).require_loss(with_target=False)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_hook_of_a_layer_that_comes_after_a_step_runs_once(*, as_list: bool) -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4), list[torch.Tensor]()
    options = {"cost": "analytic", "devices": ["cpu"] * 2, "checkpoint": "always"}
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=torch.mean, **options)
    given = {"microbatches": [(part,) for part in x.chunk(2)]} if as_list else {}

    def step() -> None:
        pipe.step(**given) if as_list else pipe.step(x)

    step()
    hook = model[0].register_forward_hook(lambda _layer, _inputs, made: seen.append(made.detach().sum()))
    step()
    assert len(seen) == 2
    step()
    hook.remove()
    step()
    assert len(seen) == 4

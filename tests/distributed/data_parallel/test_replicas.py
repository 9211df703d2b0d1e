"""A step of two equal replicas, without processes: a sum is twice its input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from pipecompile.distributed.collectives import CollectiveGroup, PendingCollective
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.replicas import Replicas
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.errors import PlanError, RunError


class Twins(CollectiveGroup):
    """The group of the two replicas. `started` has the sizes of the sums, in elements."""

    size, index = 2, 0

    def __init__(self) -> None:
        self.started, self.sent = list[int](), list[torch.Tensor]()
        self.apart = torch.zeros(11)

    def start_sum(self, tensor: torch.Tensor) -> PendingCollective:
        self.started.append(tensor.numel())
        self.sent.append(tensor)
        return PendingCollective(self, None, tensor.mul_(2))

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row, row + self.apart[: len(row)]])

    def wait(self, work: object, tensor: torch.Tensor) -> None:
        del work, tensor


def pair() -> tuple[Replicas, Twins, list[nn.Parameter]]:
    group = Twins()
    parameters = [nn.Parameter(torch.ones(size, dtype=torch.double)) for size in (2, 3, 5)]
    return Replicas(group, ShardedParameters(None, cast(Communicator, None))), group, parameters


def add(parameter: nn.Parameter, value: float) -> None:
    (parameter.sum() * value).backward()


def gradients(parameters: list[nn.Parameter]) -> list[list[float] | None]:
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


def test_each_gradient_is_reduced_once_as_soon_as_it_is_complete() -> None:
    """A bucket of the row, the loss, and a bucket for the rest; each bucket has a flag per parameter."""
    replicas, group, parameters = pair()
    first, second, _ = parameters
    add(first, 100.0)
    with replicas.reduced(lambda: iter(parameters), samples=4) as whole:
        replicas.agree("a program")
        for parameter, value in ((first, 2.0), (second, 4.0)):
            add(parameter, value)
        replicas.reduce({id(first)})
        assert first.grad is None
        assert whole(torch.tensor(3.0)).item() == 3.0
    assert group.started == [2 + 1, 1, 3 + 5 + 2]
    assert replicas.reductions == 2
    assert gradients(parameters) == [[102.0] * 2, [4.0] * 3, None]


def test_every_dtype_has_a_bucket() -> None:
    replicas, group, parameters = pair()
    parameters.append(nn.Parameter(torch.ones(4)))
    with replicas.reduced(lambda: iter(parameters), samples=None):
        for parameter in parameters:
            add(parameter, 1.0)
        replicas.reduce({id(parameters[0]), id(parameters[3])})
    assert group.started == [3, 5, 10]
    assert replicas.reductions == 3
    assert gradients(parameters) == [[2.0] * 2, [2.0] * 3, [2.0] * 5, [2.0] * 4]


def test_a_bucket_starts_without_a_copy_that_the_host_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the host waited for its GPU at each bucket, in the middle of the row: the flags of the gradients went there by such a copy."""
    replicas, group, parameters = pair()
    with replicas.reduced(lambda: iter(parameters), samples=4):
        add(parameters[0], 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", lambda *_, **how: how["non_blocking"])
            replicas.reduce({id(parameters[0])})
    assert group.started[0] == 2 + 1


def test_gradients_are_parts_of_their_bucket_and_can_be_written() -> None:
    """Each was copied out of the bucket again, which took the memory of all gradients once more."""
    replicas, group, parameters = pair()
    with replicas.reduced(lambda: iter(parameters), samples=None):
        for parameter in parameters:
            add(parameter, 1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == group.sent[-1].untyped_storage().data_ptr()
        parameter.grad.mul_(parameter.sum())  # in place, with grad mode
        assert parameter.grad.requires_grad


def test_frozen_parameters_are_not_reduced() -> None:
    replicas, group, parameters = pair()
    parameters[0].requires_grad_(requires_grad=False)
    with replicas.reduced(lambda: iter(parameters), samples=None):
        replicas.reduce({id(parameters[0])})
        add(parameters[1], 1.0)
        replicas.reduce({id(parameters[1])})
    assert group.started == [4, 6]


def test_a_step_that_fails_restores_the_gradients_of_earlier_steps() -> None:
    """The next step has nothing of the failed one."""
    replicas, _, parameters = pair()
    add(parameters[0], 7.0)

    def step(*, fails: bool) -> None:
        with replicas.reduced(lambda: iter(parameters), samples=None):
            for parameter in parameters:
                add(parameter, 1.0)
            replicas.reduce({id(parameters[0])})
            if fails:
                raise ValueError("the data are wrong")

    with pytest.raises(ValueError, match="the data are wrong"):
        step(fails=True)
    assert gradients(parameters) == [[7.0] * 2, None, None]
    step(fails=False)
    assert gradients(parameters) == [[9.0] * 2, [2.0] * 3, [2.0] * 5]


def test_a_gradient_that_is_added_after_its_reduction_started_is_an_error() -> None:
    replicas, _, parameters = pair()

    def step() -> None:
        with replicas.reduced(lambda: iter(parameters), samples=None):
            add(parameters[0], 1.0)
            replicas.reduce({id(parameters[0])})
            add(parameters[0], 1.0)

    with pytest.raises(RunError, match="a gradient was added to 1 parameter while"):
        step()


def test_replicas_with_different_programs_reduce_all_gradients_at_the_end() -> None:
    replicas, group, parameters = pair()
    group.apart = torch.tensor([0.0, 0.0, 1.0, *[0.0] * 8])
    add(parameters[0], 7.0)
    with replicas.reduced(lambda: iter(parameters), samples=4) as whole:
        group.apart = torch.tensor([0.0, 0.0, 1.0, *[0.0] * 8])
        agree_apart(replicas, group)
        add(parameters[0], 2.0)
        replicas.reduce({id(parameters[0])})
        assert not group.started
        assert whole(torch.tensor(3.0)).item() == 3.0
    assert group.started == [2 + 3 + 5 + 3]
    assert gradients(parameters) == [[9.0] * 2, None, None]


def agree_apart(replicas: Replicas, group: Twins) -> None:
    """Agree beside a replica with another program; afterwards the rows of both are equal again."""
    with replicas_alike(group):
        replicas.agree("a program")


@contextmanager
def replicas_alike(group: Twins) -> Iterator[None]:
    """Let the first row of the other replica differ, and no later one."""
    rows, first = group.all_gather, [True]

    def gathered(row: torch.Tensor) -> torch.Tensor:
        group.apart = group.apart if first.pop() else torch.zeros(11)
        first.append(False)
        return rows(row)

    with patch.object(group, "all_gather", gathered):
        yield
    group.apart = torch.zeros(11)


def test_replicas_that_must_run_one_program_raise_before_gradients_are_sent() -> None:
    replicas, group, parameters = pair()
    replicas.needs_one_program = lambda: "a layer exchanges statistics"
    add(parameters[0], 7.0)
    group.apart = torch.tensor([0.0, 0.0, 1.0, *[0.0] * 8])

    def step() -> None:
        with replicas.reduced(lambda: iter(parameters), samples=4):
            agree_apart(replicas, group)

    with pytest.raises(PlanError, match="about to run different programs"):
        step()
    assert not group.started
    assert gradients(parameters) == [[7.0] * 2, None, None]


def test_replicas_that_count_other_things_raise() -> None:
    replicas, group, parameters = pair()
    group.apart = torch.tensor([0.0, 0.0, 0.0, 1.0, *[0.0] * 7])

    def step() -> None:
        with replicas.reduced(lambda: iter(parameters), samples=4):
            replicas.agree("a program")

    with pytest.raises(PlanError, match="count other things in their parts"):
        step()

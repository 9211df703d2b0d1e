"""A weight whose home is on device 0, with a copy on device 1; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipecompile.distributed.messages.value_transport import GlooValues
from pipecompile.distributed.tied_copies import TiedCopies, TiedCopy
from pipecompile.torch_private.autograd_engine import gradient_hook_tables
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def on_ranks(function: Callable[[TiedCopies, torch.Tensor, int], Any], *, is_buffer: bool = False) -> list[Any]:
    """The tensor of rank r has the value r."""

    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        value = torch.full((2,), float(communicator.ranks.index))
        tensor = value if is_buffer else nn.Parameter(value)
        copies = TiedCopies((TiedCopy("tied 0", tensor, 0, 1),), GlooValues(communicator), communicator.ranks.index)
        result = function(copies, tensor, communicator.ranks.index)
        communicator.flush()
        return result

    return run_communicators(2, run)


def test_a_refresh_brings_the_values_of_the_home_and_drops_old_gradients() -> None:
    def refresh(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> tuple[list[float], bool]:
        tensor.grad = torch.ones(2)
        copies.refresh()
        return tensor.tolist(), tensor.grad is None

    assert on_ranks(refresh) == [([0.0, 0.0], False), ([0.0, 0.0], True)]


def test_the_gradient_of_the_copy_is_added_at_home_once_and_hooks_run_there() -> None:
    def step(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> tuple[list[float] | None, int]:
        hooked: list[int] = []
        copies.refresh()
        tensor.register_hook(lambda _: hooked.append(rank))
        if rank == 1:
            (tensor * 3).sum().backward()
            hooked.clear()
        else:
            tensor.grad = torch.ones(2)
        copies.settle()
        return None if tensor.grad is None else tensor.grad.tolist(), len(hooked)

    assert on_ranks(step) == [([4.0, 4.0], 1), (None, 0)]


def test_hooks_of_the_copy_do_not_run_in_the_program_and_are_kept() -> None:
    """The home runs them: a hook that halves gave a quarter of the part of the copy, without a word, before."""

    def step(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> tuple[list[float] | None, int]:
        halves = tensor.register_hook(lambda gradient: gradient / 2)
        joint: list[int] = []
        torch.autograd.graph.register_multi_grad_hook([tensor], lambda _: joint.append(rank))
        copies.refresh()
        with copies.unhooked():
            (tensor * 4).sum().backward()
        copies.settle()
        table, *_ = gradient_hook_tables(tensor)
        assert halves.id in table
        return None if tensor.grad is None else tensor.grad.tolist(), len(joint)

    assert on_ranks(step) == [([4.0, 4.0], 1), (None, 1)]


def test_a_copy_without_a_gradient_adds_none() -> None:
    def step(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> object:
        copies.refresh()
        copies.settle()
        return tensor.grad

    assert on_ranks(step) == [None, None]


def test_in_place_writes_of_a_copy_go_home() -> None:
    def step(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> list[float]:
        copies.refresh()
        if rank == 1:
            with torch.no_grad():
                tensor += 7
        copies.settle()
        return tensor.tolist()

    assert on_ranks(step) == [[7.0, 7.0]] * 2
    assert on_ranks(step, is_buffer=True) == [[7.0, 7.0]] * 2


def test_a_parameter_that_is_not_written_is_not_sent_home() -> None:
    """The home may have changed meanwhile, through `.data`."""

    def step(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> list[float]:
        copies.refresh()
        if rank == 0:
            tensor.data.fill_(9.0)
        copies.settle()
        return tensor.tolist()

    assert on_ranks(step)[0] == [9.0, 9.0]


def test_the_ids_of_tied_tensors() -> None:
    def ids(copies: TiedCopies, tensor: torch.Tensor, rank: int) -> bool:
        return copies.tied == {id(tensor)}

    assert on_ranks(ids) == [True, True]

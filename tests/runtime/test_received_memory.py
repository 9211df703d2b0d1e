"""Memory of receive buffers that outlives its reader. test_streams.py has outputs that are views of it."""

from __future__ import annotations

import torch

from pipecompile.runtime.received_memory import copying_views, free_received
from pipecompile.runtime.registers import Frame


def test_memory_that_something_holds_is_reused_after_the_compute_alone() -> None:
    """A gradient that is a view of a received one becomes a `.grad`: before, its memory went back to the copies, which wait for nobody."""
    released: list[torch.Tensor] = []
    free, received = free_received(0, released.append), torch.zeros(4)
    free(Frame([received, received], []))
    assert not released
    stolen = received.view(2, 2)
    frame = Frame([received, received], [])
    free(frame)
    assert frame.registers == [None, received]
    assert released == [received]
    assert stolen is not None


def test_memory_of_sparse_tensors_and_of_containers_is_reused_after_the_compute() -> None:
    """Autograd may have saved them: their memory went back to the copies, and was written while compute read it."""
    released: list[torch.Tensor] = []
    inner = torch.ones(2)
    for value in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), (inner, {"a": [inner, 3]}), 5):
        free_received(0, released.append)(Frame([value], []))
    assert [one.numel() for one in released] == [4, 2, 2, 3, 2, 2, 2]
    assert released[-1] is inner


def test_an_output_that_is_a_view_of_a_part_of_what_was_received_is_copied() -> None:
    inner = torch.ones(2, 2)
    frame = Frame([(inner, 1), None], [])

    def run(own: Frame) -> None:
        own.registers[1] = own.registers[0][0].t()

    copying_views(run, [0], [1])(frame)
    inner.zero_()  # the next copy into the buffer
    assert frame.registers[1].tolist() == [[1.0] * 2] * 2

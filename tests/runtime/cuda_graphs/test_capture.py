"""Which devices have graphs; capturing itself on a GPU, if there is one."""

from __future__ import annotations

import pytest
import torch

from pipecompile.runtime.cuda_graphs.capture import CudaGraphCapture, graph_captures


def test_a_cpu_has_no_graphs() -> None:
    assert graph_captures(torch.device("cpu")) is None
    assert graph_captures(torch.device("cuda:0")) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replay_computes_on_the_static_input() -> None:
    capture = CudaGraphCapture(torch.device("cuda:0"))
    x = torch.ones(3, device="cuda")
    (x * 2).sum()
    torch.cuda.synchronize()
    made, replay = capture.capture(lambda: x * 2)
    x.fill_(5)
    replay()
    capture.drain()
    assert made.tolist() == [10] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rehearsal_finds_a_wait_of_the_host() -> None:
    capture = CudaGraphCapture(torch.device("cuda:0"))
    x = torch.ones(3, device="cuda")
    assert capture.rehearse(lambda: x * 2)[1] is None
    value, reason = capture.rehearse(lambda: x.sum().item())
    assert value == 3
    assert reason is not None
    assert "the host waits for the device" in reason

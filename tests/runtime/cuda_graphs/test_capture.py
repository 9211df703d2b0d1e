"""Which devices have graphs; capturing itself on a GPU, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from pipecompile.runtime.cuda_graphs import capture
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


class PretendedCuda:
    """CUDA's part in captures: the current stream, whether allocations go to a pool, whether generators are in capture mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.captures, self.pools, self.in_capture_mode = "own", 0, set[object](), False
        self.is_invalid = False
        for name, value in (
            ("Stream", lambda _: "capturing"),
            ("synchronize", lambda: None),
            ("device", lambda _: nullcontext()),
            ("stream", self.stream),
            ("graph_pool_handle", lambda: ("pool", len(self.pools))),
            ("CUDAGraph", lambda: self),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(capture, "_STREAMS", {})
        monkeypatch.setattr(capture, "end_allocations", lambda _, pool, *, is_shared: self.pools.discard(pool))

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pool, self.in_capture_mode = pool, True
        self.pools.add(pool)

    def capture_end(self) -> None:
        """As in torch: what invalidated the capture raises here, before anything is restored."""
        if self.is_invalid:
            self.is_invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.pools.discard(self.pool)
        self.in_capture_mode = False
        self.captures += 1

    def replay(self) -> None:
        """Replays nothing."""


@pytest.mark.parametrize("raises", [False, True])
def test_a_capture_that_fails_leaves_cuda_as_it_was(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the current stream stayed that of the capture, and allocations went to its pool for ever."""
    cuda = PretendedCuda(monkeypatch)

    def run() -> int:
        assert cuda.current == "capturing"
        cuda.is_invalid = True
        if raises:
            raise RuntimeError("the run waits")
        return 1

    with pytest.raises(RuntimeError, match="the run waits" if raises else "previous error"):
        CudaGraphCapture(torch.device("cuda:0")).capture(run)
    assert (cuda.current, cuda.pools, cuda.in_capture_mode) == ("own", set(), False)


def test_captures_of_a_device_share_a_stream_and_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    first, second = CudaGraphCapture(torch.device("cuda:0")), CudaGraphCapture(torch.device("cuda:0"))
    assert first.stream is second.stream
    assert first.capture(lambda: 5)[0] == 5
    pool = cuda.pool
    first.capture(lambda: 5)
    assert cuda.pool == pool
    assert (cuda.current, cuda.captures) == ("own", 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("raises", [False, True])
def test_after_a_failed_capture_a_gpu_works_on(raises: bool) -> None:
    stream, made = torch.cuda.current_stream(), CudaGraphCapture(torch.device("cuda:0"))
    x = torch.ones(3, device="cuda")

    def run() -> torch.Tensor:
        y = x * torch.rand(3, device="cuda")
        if raises:
            raise ValueError("stop")
        torch.cuda.synchronize()
        return y

    with pytest.raises((RuntimeError, ValueError)):
        made.capture(run)
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").isfinite().all()
    torch.empty(1 << 28, device="cuda")
    torch.cuda.empty_cache()
    assert made.capture(lambda: x * 2)[0].shape == (3,)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipecompile.costs.kernels import Kernel, KernelLog

X = torch.randn(10, 10)
BYTES = 400


def kernels(work: Callable[[Tensor], object]) -> tuple[Kernel, ...]:
    log = KernelLog()
    with log:
        work(X)
    return log.take()


@pytest.mark.parametrize(
    "work",
    [lambda x: x.view(100), lambda x: x[2:], lambda x: x.t().detach(), lambda x: x.reshape(-1), torch.empty_like],
)
def test_views_and_allocations_launch_nothing(work: Callable[[Tensor], object]) -> None:
    assert kernels(work) == ()


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda x: x + x, 2 * BYTES),  # each operand is read once
        (lambda x: x + x.clone(), 2 * BYTES + 3 * BYTES),
        (lambda x: x.t().contiguous(), 2 * BYTES),
        (lambda x: x[:1].expand(10, 10) + 0, 40 + BYTES),  # what is expanded is read once
        (lambda x: torch.nn.functional.embedding(torch.tensor([1, 2]), x), 2 * 80 + 16),  # two rows, not the table
        (lambda x: torch.zeros(10, 10), BYTES),
        (lambda x: torch.empty(10, 10).copy_(x), 2 * BYTES),  # the target is written, not read
        (lambda x: torch.empty(10, 10).fill_(1), BYTES),
    ],
)
def test_bytes_moved(work: Callable[[Tensor], object], moved: int) -> None:
    assert sum(kernel.moved for kernel in kernels(work)) == moved


def test_matrix_product() -> None:
    assert kernels(lambda x: x @ x[:, :5]) == (Kernel(2 * 10 * 10 * 5, BYTES + 200 + 200, torch.float32),)


def test_the_dtype_is_that_of_the_first_floating_operand() -> None:
    assert [kernel.dtype for kernel in kernels(lambda x: x.bfloat16())] == [torch.float32]
    assert [kernel.dtype for kernel in kernels(lambda x: torch.zeros(3, dtype=torch.float64))] == [torch.float64]
    assert [kernel.dtype for kernel in kernels(lambda x: torch.zeros(3, dtype=torch.int8).bool())] == [
        torch.int8,
        torch.int8,
    ]


def test_taking_starts_anew() -> None:
    log = KernelLog()
    with log:
        X.exp()
    assert (len(log.take()), log.take()) == (1, ())

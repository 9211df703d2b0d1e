"""FLOPs of operators that torch's counter does not know equal those of the same computation in plain products."""

from __future__ import annotations

from math import log2

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.costs import flop_formulas
from pipecompile.costs.analytic import node_work
from pipecompile.costs.flop_formulas import FlopCount


class Applied(nn.Module):
    """A function of trained copies of the inputs."""

    def __init__(self, function, *tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.weights) * x.sum()


def flops(function, *tensors: Tensor) -> tuple[float, float]:
    """Return the FLOPs of all nodes, forward and backward."""
    x = torch.ones(2)
    work = [visit.reading for visit in node_work(pc.trace(Applied(function, *tensors), x), [x]).values()]
    return sum(each.flops for each in work), sum(each.backward_flops for each in work)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def of_attention() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 16, 8), torch.randn(2, 3, 12, 8), torch.randn(2, 3, 12, 8)


def test_fused_attention_counts_as_its_products_and_its_backward_computes_the_scores_again():
    q, k, v = of_attention()
    fused = flops(F.scaled_dot_product_attention, q, k, v)
    plain = flops(plain_attention, q, k, v)
    scores = 2 * 2 * 3 * 16 * 12 * 8
    assert fused == (plain[0], plain[1] + scores) == (2 * scores, 5 * scores)


def test_groups_of_heads_share_keys_and_a_causal_mask_counts_as_none():
    q, k = torch.randn(2, 6, 16, 8), torch.randn(2, 3, 16, 8)
    every, _ = flops(F.scaled_dot_product_attention, q, q, q)
    shared, _ = flops(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), q, k)
    assert shared == every > 0


def test_groups_count_as_one_product_each():
    x, w = torch.randn(64, 16, dtype=torch.bfloat16), torch.randn(4, 16, 24, dtype=torch.bfloat16)
    ends = torch.arange(1, 5, dtype=torch.int32) * 16
    grouped = flops(lambda x, w: torch._grouped_mm(x, w, offs=ends).float().sum(), x, w)
    one_by_one = flops(lambda x, w: torch.bmm(x.reshape(4, 16, 16), w).float().sum(), x, w)
    assert grouped[0] == one_by_one[0] > 0
    assert grouped[1] > 0


def test_distances_count_as_a_product():
    x = torch.randn(3, 16, 8)
    assert flops(torch.cdist, x, x)[0] == flops(lambda a, b: a @ b.mT, x, x)[0]


def test_transforms_of_real_numbers_count_half():
    x = torch.randn(4, 64)
    full, _ = flops(lambda x: torch.fft.fft(torch.complex(x, x)).abs(), x)
    half, _ = flops(lambda x: torch.fft.rfft(x).abs(), x)
    assert (full, half) == (5 * 4 * 64 * log2(64), 2.5 * 4 * 64 * log2(64))
    assert flops(lambda x: torch.fft.irfft(torch.complex(x, x), n=126), x)[0] == 2.5 * 4 * 126 * log2(126)


def test_a_bilinear_layer_counts_three_for_each_pair_of_features():
    x, w = torch.randn(16, 8), torch.randn(4, 8, 8)
    assert flops(lambda x, w: F.bilinear(x, x, w), x, w)[0] == 3 * 16 * 4 * 8 * 8


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (torch.linalg.inv, 2 * 8**3),
        (torch.linalg.det, 2 / 3 * 8**3),
        (lambda a: torch.linalg.cholesky(a @ a.mT), 8**3 / 3 + 2 * 8**3),
        (lambda a: torch.linalg.qr(a).Q, 8 / 3 * 8**3),
        (lambda a: torch.linalg.svd(a).S, 22 * 8**3),
        (lambda a: torch.linalg.eigh(a + a.mT).eigenvalues, 9 * 8**3),
        (lambda a: torch.linalg.solve(a, a[..., :2]), 2 / 3 * 8**3 + 2 * 8**2 * 2),
        (lambda a: torch.linalg.solve_triangular(a, a[..., :2], upper=True), 8**2 * 2),
    ],
)
def test_decompositions_of_three_matrices_of_eight_rows(function, count):
    assert flops(function, torch.randn(3, 8, 8))[0] == pytest.approx(3 * count)


@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_the_kernel_of_a_whole_recurrent_layer_counts_as_its_products(is_bidirectional):
    """oneDNN runs an LSTM on the CPU as one operator; plain kernels are products."""
    layer, x = nn.LSTM(8, 4, 2, bidirectional=is_bidirectional), torch.randn(5, 3, 8)
    with FlopCount() as fused:
        layer(x)
    with FlopCount() as plain, torch.backends.mkldnn.flags(enabled=False):
        layer(x)
    assert fused.flops == plain.flops > 0


def test_an_operator_without_a_formula_for_its_arguments_counts_as_nothing(monkeypatch):
    def fails(*_: object) -> float:
        raise ValueError("unknown")

    monkeypatch.setitem(flop_formulas._FORMULAS, "mm", fails)
    with FlopCount() as count:
        y = torch.ones(2, 2) @ torch.ones(2, 2)
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    assert y.sum() == 8
    assert count.flops == 2 * 2**3

"""FLOPs of one kernel: the formulas of `torch.utils.flop_counter`, and our own for operators that it lacks or counts wrongly.

    attention            fake tensors on the CPU run an operator of their own. A causal mask counts as none, as in torch: kernels skip half
                         of the pairs of query and key, and reach about half the rate of plain products on the others
    grouped products     the experts of a mixture
    distances, FFTs      `torch.cdist`, `torch.fft`
    recurrent layers     kernels of oneDNN and cuDNN that run a whole layer
    decompositions       LU, Cholesky, QR, SVD, eigenvalues: Golub and Van Loan, "Matrix Computations", 4th edition
    convolution          the weight gradient of a grouped one

A multiplication and an addition count as two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from math import log2, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipecompile.torch_private.fx_graphs import OpOverload
from pipecompile.torch_private.modes import ObservingMode
from pipecompile.torch_private.operators import schema_of

__all__ = ["FlopCount", "flops_of"]

Named = Mapping[str, Any]
"""The arguments of an operator, by the names of its schema."""

Formula = Callable[[Named, Any], Any]
"""The FLOPs of a call, of its arguments and its result."""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the FLOPs of a call of an operator; 0 for one that only moves memory, such as an elementwise one."""
    if (own := _FORMULAS.get(func.overloadpacket.__name__)) is not None:
        names = (argument.name for argument in schema_of(func).arguments)
        return float(own(dict(zip(names, args, strict=False)) | dict(kwargs), result))
    formula = _formulas_of_torch().get(func.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


class FlopCount(ObservingMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that adds up the FLOPs of operators. An operator whose formula fails on its arguments counts as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            with suppress(Exception):
                self.flops += flops_of(func, args, kwargs, result)
        return result


@cache
def _formulas_of_torch() -> Mapping[Any, Callable[..., Any]]:
    return FlopCounterMode(display=False).flop_registry


def _pairs(named: Named) -> Any:
    """Return the pairs of a query and a key, over all heads."""
    return float(prod(named["query"].shape[:-1]) * named["key"].shape[-2])


def _attention(named: Named, _: Any) -> Any:
    return 2 * _pairs(named) * (named["query"].shape[-1] + named["value"].shape[-1])


def _attention_backward(named: Named, _: Any) -> Any:
    """Return the FLOPs of five products: scores again, and gradients of scores, values, keys and queries."""
    return 2 * _pairs(named) * (3 * named["query"].shape[-1] + 2 * named["value"].shape[-1])


def _grouped_product(named: Named, _: Any) -> Any:
    """Return the FLOPs of a product of groups: a two-dimensional operand holds the rows or columns of all groups."""
    a, b = named["self"].shape, named["mat2"].shape
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2.0 * groups * a[-2] * a[-1] * b[-1]


def _distances(named: Named, result: Any) -> Any:
    return 2.0 * named.get("cdist", result).numel() * named["x1"].shape[-1]


def _transform(named: Named, result: Any, *, real: bool) -> Any:
    """Return 5 n log2(n) per transform of n points, half of it for real ones."""
    values = max(named["self"], result, key=Tensor.numel) if real else named["self"]
    points = prod(values.shape[d] for d in named["dim"])
    return (2.5 if real else 5.0) * values.numel() * log2(max(points, 2))


def _recurrent_layer(named: Named, _: Any) -> Any:
    """Return the FLOPs of a product of each weight matrix with each time step of each sample. Rows of a packed input are those of
    all samples.
    """
    weights = named["weight"] if "weight" in named else [named["weight0"], named["weight1"]]
    rows = named["input"].numel() / named["input"].shape[-1]
    return 2.0 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _trilinear(named: Named, _: Any) -> Any:
    sizes = [list(named[f"i{number}"].shape) for number in (1, 2, 3)]
    for shape, number in zip(sizes, (1, 2, 3), strict=True):
        for place in sorted(named[f"expand{number}"]):
            shape.insert(place, 1)
    return 3.0 * prod(map(max, zip(*sizes, strict=True)))


def _convolution_backward(named: Named, _: Any) -> float:
    """Return as many FLOPs as the forward for each requested gradient.

    torch's formula counts the weight gradient of a grouped convolution as if it were dense; in a depthwise convolution
    that is hundreds of times too many (seen in 2.15).
    """
    geometry = [named[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    forward = _formulas_of_torch()[torch.ops.aten.convolution]
    flops = forward(named["input"], named["weight"], None, *geometry, out_val=named["grad_output"])
    return float(flops * sum(named["output_mask"][:2]))


def _decomposition(flops: Callable[[int, int], float]) -> Formula:
    """Return the formula of a decomposition of matrices with m rows and n <= m columns, or the other way round."""

    def formula(named: Named, _: Any) -> Any:
        *batch, m, n = named.get("A", named.get("self")).shape
        return prod(batch) * flops(max(m, n), min(m, n))

    return formula


def _solution(matrix: str, right: str, per_column: float, factor: float = 0.0) -> Formula:
    """Return the formula of `per_column` n^2 for each column of the right side, and `factor` n^3 for the decomposition."""

    def formula(named: Named, _: Any) -> Any:
        n, columns = named[matrix].shape[-1], named[right].numel() / max(named[matrix].shape[-1], 1)
        batch = prod(named[matrix].shape[:-2])
        return per_column * n * n * columns + batch * factor * n**3

    return formula


_ATTENTION = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)

_LU = _decomposition(lambda m, n: m * n**2 - n**3 / 3)

_FORMULAS: dict[str, Formula] = {
    **{f"_scaled_dot_product_{kind}": _attention for kind in _ATTENTION},
    **{f"_scaled_dot_product_{kind}_backward": _attention_backward for kind in _ATTENTION},
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_int_mm"), _grouped_product),
    **dict.fromkeys(("_cdist_forward", "_cdist_backward"), _distances),
    "_fft_c2c": lambda named, result: _transform(named, result, real=False),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r"), lambda named, result: _transform(named, result, real=True)),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn"), _recurrent_layer),
    "_trilinear": _trilinear,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "linalg_lu", "linalg_lu_factor_ex"), _LU),
    "linalg_inv_ex": _decomposition(lambda _, n: 2 * n**3),
    "linalg_cholesky_ex": _decomposition(lambda _, n: n**3 / 3),
    "linalg_qr": _decomposition(lambda m, n: 4 * (m * n**2 - n**3 / 3)),
    "_linalg_svd": _decomposition(lambda m, n: 14 * m * n**2 + 8 * n**3),
    "_linalg_eigh": _decomposition(lambda _, n: 9 * n**3),
    "linalg_eig": _decomposition(lambda _, n: 25 * n**3),
    "_linalg_solve_ex": _solution("A", "B", 2.0, 2 / 3),
    "linalg_solve_triangular": _solution("self", "B", 1.0),
    "linalg_lu_solve": _solution("LU", "B", 2.0),
    "cholesky_solve": _solution("input2", "self", 2.0),
}  # fmt: skip

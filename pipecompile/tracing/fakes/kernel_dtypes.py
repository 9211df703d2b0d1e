"""Dtypes that kernels refuse and fake tensors accept: a recording refuses them as the kernel would, where the model calls it.

    linear(int64, float32)         fakes return float32     kernels raise: the tensors of a product have one dtype
    gelu(int64)                    fakes return int64       kernels raise: there is none for whole numbers

`RULES` has the operators by name. What fakes refuse themselves (`bmm`, `conv2d`) needs no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["RULES", "check_dtypes"]

_PLAIN = (torch.float32, torch.float64)


def check_dtypes(operator: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError if the kernels of an operator have no version for the dtypes of its arguments."""
    name = str(getattr(operator, "overloadpacket", ""))
    if name in RULES:
        RULES[name](name, [argument for argument in args if isinstance(argument, torch.Tensor)])


def _alike(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless all tensors have one dtype: those of a matrix product."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(dtypes) > 1:
        raise RuntimeError(f"{name} multiplies tensors of one dtype, and these are {_names(dtypes)}")


def _floating(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if the input has whole numbers."""
    if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise RuntimeError(f"{name} is not implemented for {_names([tensors[0].dtype])}")


def _numeric(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if tensors[0].dtype is torch.bool:
        raise RuntimeError(f"{name} is not implemented for bool")


def _normal(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if input and weights are of float32 and float64. Low precision may meet weights of float32."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors[:3])
    if len(dtypes) > 1 and all(dtype in _PLAIN for dtype in dtypes):
        raise RuntimeError(f"{name} takes an input and weights of one dtype, and these are {_names(dtypes)}")


def _indices(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if tensors[-1].dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name} takes indices of int32 or int64, and these are {_names([tensors[-1].dtype])}")


def _class_indices(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if tensors[1].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"{name} takes class indices of int64, and these are {_names([tensors[1].dtype])}")


def _names(dtypes: Any) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


RULES: dict[str, Callable[[str, Sequence[torch.Tensor]], None]] = {
    **dict.fromkeys(("aten.linear", "aten.mm", "aten.addmm", "aten.mv", "aten.addmv", "aten.dot"), _alike),
    **dict.fromkeys(("aten.gelu", "aten.silu", "aten._softmax", "aten._log_softmax"), _floating),
    **dict.fromkeys(("aten.native_layer_norm", "aten.native_batch_norm"), _normal),
    **dict.fromkeys(("aten._native_batch_norm_legit", "aten._native_batch_norm_legit_no_training"), _normal),
    **dict.fromkeys(("aten.nll_loss", "aten.nll_loss_forward"), _class_indices),
    "aten.relu": _numeric,
    **dict.fromkeys(("aten.index_select", "aten.embedding"), _indices),
}
"""By the name of an operator of torch, the check of the tensors among its arguments, in their order."""

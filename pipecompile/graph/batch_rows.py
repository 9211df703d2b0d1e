"""Calls that keep the samples of a batch apart, recognised without running them: element by element, along other dimensions.

    y = relu(x)          (B, C)  one row a sample: each row of y comes from the same row of x
    x.softmax(1)         (B, C)  over another dimension than the batch
    x.softmax(0)         None    over the batch: this module does not decide

`kept_apart` says yes or nothing. `batch_probes` decides the rest by running the call on small random batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from pipecompile.graph.row_order import by_sample, rows_each, word_of
from pipecompile.torch_private.dtensors import is_redistribution
from pipecompile.torch_private.modules import BatchNorm
from pipecompile.tracing.fakes.batch_symbol import batch_dims_of
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["ALONG", "ELEMENT_LAYERS", "MOVES", "RESHAPES", "batch_dim_of", "dims_along", "is_elementwise", "kept_apart", "makes_unrelated_elements", "moves_rows", "takes_samples", "takes_sizes"]  # fmt: skip

_ALIASES = {"truediv": "div", "floordiv": "floor_divide", "and_": "bitwise_and", "or_": "bitwise_or", "matmul": "matmul",
            "invert": "bitwise_not", "pos": "positive", "dropout1d": "dropout", "dropout2d": "dropout", "dropout3d": "dropout",
            "imul": "mul", "iadd": "add", "isub": "sub", "itruediv": "div"}  # fmt: skip
"""Names of Python's operators and of torch.nn.functional, by the operator of torch that does the same element by element."""

_ELEMENTWISE = frozenset(
    ("dropout", "relu", "relu6", "gelu", "silu", "mish", "elu", "celu", "selu", "hardtanh", "leaky_relu", "softplus", "logsigmoid",
     "hardswish", "hardsigmoid", "softsign", "tanhshrink", "float", "half", "double", "bfloat16", "int", "long", "bool", "to", "type",
     "type_as", "clone", "contiguous", "detach", "masked_fill", "alpha_dropout", "feature_dropout", "requires_grad_", "zeros_like",
     "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "bernoulli", "uniform", "normal",
     "exponential", "geometric", "random", "log_normal", "cauchy", "cpu", "cuda")
)  # fmt: skip
"""Further functions that work element by element."""

_FACTORIES = frozenset(("new_empty", "new_zeros", "new_ones", "new_full"))
"""Functions of a tensor that read no element of it."""

MOVES = frozenset(
    ("permute", "transpose", "swapaxes", "swapdims", "movedim", "t", "unsqueeze", "expand", "expand_as", "mT", "T")
)
"""Functions that move or add dimensions and keep the order inside each."""

RESHAPES = frozenset(("reshape", "view", "flatten", "unflatten", "squeeze", "reshape_as", "view_as"))

ALONG = frozenset(
    ("softmax", "log_softmax", "sum", "mean", "amax", "amin", "cumsum", "logsumexp", "norm", "var", "std", "prod", "argmax", "argmin",
     "normalize", "glu", "sort", "argsort", "flip", "chunk", "split", "tensor_split", "unbind", "any", "all", "max", "min", "topk",
     "pad")
)  # fmt: skip
"""Functions along `dim`, or along `dims`: rows stay apart if these are not the batch."""

_SHAPED_AS = frozenset(("expand_as", "reshape_as", "view_as"))
"""Functions that read no element of their second argument."""

_DEFAULT_DIM = {"normalize": 1, "glu": -1, "sort": -1, "argsort": -1, "topk": -1} | dict.fromkeys(
    ("chunk", "split", "tensor_split", "unbind"), 0
)
_SECOND = frozenset(("chunk", "split", "tensor_split", "norm", "normalize", "topk"))
"""Functions whose `dim` is the third argument."""

_IMAGES = frozenset(
    f"{kind}{n}d"
    for kind in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for n in (1, 2, 3)
) | {"interpolate", "pixel_shuffle", "pixel_unshuffle", "grid_sample", "group_norm", "instance_norm"}
"""Functions on (batch, channels, ...)."""

_ROW_MOVERS = frozenset(
    ("getitem", "setitem", "index_select", "index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce",
     "masked_scatter", "gather", "take_along_dim", "matmul", "mm", "bmm", "baddbmm", "einsum")
)  # fmt: skip
"""Functions that can bring rows back in their order, by an index or by a matrix of zeros and ones."""

_MATRICES = frozenset(
    f"{prefix}{name}"
    for name in ("cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv",
                 "inverse", "inv_ex", "logdet", "lu", "lu_factor", "lu_solve", "matrix_exp", "pinv", "pinverse", "qr", "slogdet",
                 "solve_triangular", "svd", "svdvals")
    for prefix in ("", "linalg_")
)  # fmt: skip
"""Functions on matrices, which are the last two dimensions. Most random matrices are none that `cholesky` takes."""

_UNRELATED = frozenset(("rand", "randn", "randint", "normal", "empty"))
"""Functions that draw each element by itself, or leave it to be written."""

_KINDS = ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "InstanceNorm")
_IMAGE_LAYERS = (*(getattr(nn, f"{kind}{n}d") for kind in _KINDS for n in (1, 2, 3)),
                 BatchNorm, nn.GroupNorm, nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.LocalResponseNorm)  # fmt: skip
_SEQUENCE_LAYERS = (nn.RNNBase, nn.MultiheadAttention)
ELEMENT_LAYERS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.GELU,
                   nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish,
                   nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Embedding)  # fmt: skip


def batch_dim_of(value: Any, symbol: Any) -> int | None:
    """Return the one dimension of a tensor that has a whole number of rows for each sample; None if there is none or more."""
    found = batch_dims_of(value, symbol) if isinstance(value, torch.Tensor) else []
    return found[0][0] if len(found) == 1 and rows_each(found[0][1], symbol) is not None else None


def takes_samples(node: fx.Node, symbol: Any) -> bool:
    """Return whether an input of a node has rows for each sample."""
    return any(batch_dim_of(value_of(one), symbol) is not None for one in node.all_input_nodes)


def kept_apart(
    node: fx.Node, graph: TracedGraph, batched: Sequence[fx.Node], adjacent: dict[fx.Node, bool] | None = None
) -> bool:
    """Return whether a call certainly computes each sample's rows from the same sample's rows of `batched`.

    `batched` are its arguments with rows of samples; all others are the same for every sample. `adjacent` keeps the answers of
    `by_sample` from call to call.
    """
    symbol = graph.facts.symbol
    values = [leaf for leaf in _leaves(value_of(node)) if isinstance(leaf, torch.Tensor)]
    dims = [batch_dim_of(value, symbol) for value in values]
    if not batched or not values or None in dims:
        return False
    if node.op == "call_module":
        return _layer_keeps(graph.get_submodule(str(node.target)), batched, symbol)
    read = node.args[:1] if word_of(node) in _SHAPED_AS else batched
    sources = {source: batch_dim_of(value_of(source), symbol) for source in batched if source in read}
    if word_of(node) in _FACTORIES or not sources:
        return True
    if None in sources.values():
        return False
    word = word_of(node).strip("_") if not word_of(node).endswith("__") else word_of(node)
    word = str(node.args[1]) if word == "getattr" else word
    if word in RESHAPES:
        return len(sources) == 1 and by_sample(node, symbol, adjacent)
    if word in _MATRICES:
        return _has_matrices(node, sources, dims)  # type: ignore[arg-type]
    return _function_keeps(word, node, sources, values, dims, symbol)  # type: ignore[arg-type]


def _leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, (tuple, list)) else [value]


def _layer_keeps(layer: nn.Module, batched: Sequence[fx.Node], symbol: Any) -> bool:
    dims = {source: batch_dim_of(value_of(source), symbol) for source in batched}
    first: torch.Tensor = value_of(batched[0])
    if isinstance(layer, ELEMENT_LAYERS):
        return len(batched) == 1
    if isinstance(layer, _IMAGE_LAYERS):
        return dims[batched[0]] == 0 and first.dim() > 1
    if isinstance(layer, nn.Linear):
        return dims[batched[0]] != first.dim() - 1
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return bool((dims[batched[0]] or 0) < first.dim() - len(layer.normalized_shape))
    if isinstance(layer, _SEQUENCE_LAYERS):
        return None not in dims.values() and first.dim() == 3
    if isinstance(layer, nn.Flatten):
        return dims[batched[0]] == 0 and bool(layer.start_dim > 0)
    return False


def _function_keeps(
    word: str,
    node: fx.Node,
    sources: dict[fx.Node, int],
    values: Sequence[torch.Tensor],
    dims: Sequence[int],
    symbol: Any,
) -> bool:
    aligned = all(dim - value_of(s).dim() == dims[0] - values[0].dim() for s, dim in sources.items())
    rows = {rows_each(value_of(s).shape[dim].node.expr, symbol) for s, dim in sources.items()}
    length: Any = values[0].shape[dims[0]]
    same_rows = rows == {rows_each(length.node.expr, symbol)}
    (first, dim), *others = sources.items()
    if is_elementwise(word) or is_redistribution(node.target):
        return aligned and same_rows
    if word in MOVES:
        return not others and same_rows
    if word in ALONG:
        return (
            not others
            and same_rows
            and first is node.args[0]
            and dim not in dims_along(word, node, value_of(first).dim())
        )
    if word in ("cat", "stack", "concat", "concatenate"):
        return same_rows and _is_cat_beside(node, sources, values[0].dim(), dims[0])
    if word == "batch_norm":
        return dim == 0 and not others and _has_running_statistics(node)
    if word in _IMAGES:
        return not others and first is node.args[0] and dim == dims[0] == 0
    if word == "getitem" and not others and first is node.args[0]:
        return same_rows and _all_of(node.args[1], dim)
    return _product_keeps(word, node, sources, values[0], dims[0], aligned=aligned and same_rows)


def _is_cat_beside(node: fx.Node, sources: dict[fx.Node, int], rank: int, dim: int) -> bool:
    """Return whether tensors with rows of samples are concatenated or stacked along another dimension than the batch."""
    joined: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    return len(set(sources.values())) == 1 and _all_batched(node, sources) and joined % rank != dim


def _product_keeps(
    word: str, node: fx.Node, sources: dict[fx.Node, int], value: torch.Tensor, dim: int, *, aligned: bool
) -> bool:
    (first, at), *others = sources.items()
    rank = value_of(first).dim()
    if word in ("linear", "layer_norm", "rms_norm", "embedding"):
        tail = len(node.args[1]) if word.endswith("norm") and isinstance(node.args[1], (tuple, list)) else 1
        return not others and (word == "embedding" or (first is node.args[0] and at < rank - tail))
    if word in ("matmul", "bmm", "scaled_dot_product_attention"):
        batch_part = all(d < value_of(source).dim() - 2 for source, d in sources.items())
        rows = word == "matmul" and not others and first is node.args[0] and at < rank - 1 and rank > 1
        return (aligned and batch_part and dim < value.dim() - 2) or rows
    return False


def _has_matrices(node: fx.Node, sources: dict[fx.Node, int], dims: Sequence[int]) -> bool:
    """Return whether the batch is the same dimension of all tensors, and none of a matrix."""
    ranks = {value_of(source).dim() for source in sources}
    tensors = [value for one in node.all_input_nodes if isinstance(value := value_of(one), torch.Tensor)]
    is_aligned = len(ranks) == len({*dims, *sources.values()}) == 1
    return is_aligned and all(tensor.dim() <= max(ranks) for tensor in tensors) and dims[0] < max(ranks) - 2


def makes_unrelated_elements(node: fx.Node) -> bool:
    """Return whether a call makes elements that depend on no tensor, nor on each other: in any batch, each sample has its own."""
    is_free = not any(isinstance(value_of(one), torch.Tensor) for one in node.all_input_nodes)
    return word_of(node) in _UNRELATED and is_free


def is_elementwise(word: str) -> bool:
    """Return whether a function of this name computes each element from the elements in the same place."""
    return word in _ELEMENTWISE or _is_pointwise(word)


def _is_pointwise(word: str) -> bool:
    packet = getattr(torch.ops.aten, _ALIASES.get(word, word), None)
    return packet is not None and all(
        torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads()[:1]
    )


def dims_along(word: str, node: fx.Node, rank: int) -> set[int]:
    """Return the dimensions that a call works along; all of them if it does not say."""
    place = 2 if word in _SECOND else 1
    given: Any = node.kwargs.get("dim", node.kwargs.get("dims", node.args[place] if len(node.args) > place else None))
    if word == "pad":
        sizes: Any = node.kwargs.get("pad", given)
        return set(range(rank - len(sizes) // 2, rank)) if isinstance(sizes, (tuple, list)) else set(range(rank))
    if word == "flip" and isinstance(given, int):
        given = node.args[1:]
    if given is None:
        given = _DEFAULT_DIM.get(word)
    if word in ("max", "min") and not isinstance(given, int):
        return set(range(rank))
    numbers = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(numbers, (tuple, list)) or not numbers or not all(isinstance(one, int) for one in numbers):
        return set(range(rank))
    return {one % rank for one in numbers}


def _has_running_statistics(node: fx.Node) -> bool:
    """Return whether `F.batch_norm` is a BatchNorm layer's: `batch_norm=` says what happens to those."""
    mean = node.kwargs.get("running_mean", node.args[1] if len(node.args) > 1 else None)
    return isinstance(mean, fx.Node) and mean.op == "get_attr"


def _all_batched(node: fx.Node, sources: dict[fx.Node, int]) -> bool:
    parts = node.args[0] if node.args else node.kwargs.get("tensors")
    return isinstance(parts, (tuple, list)) and all(part in sources for part in parts)


def _all_of(index: Any, dim: int) -> bool:
    """Return whether x[index] takes all rows along `dim` in their order; the size is known to stay."""
    place = 0
    for one in index if isinstance(index, tuple) else (index,):
        if isinstance(one, fx.Node) or one is Ellipsis:
            return False
        if one is None:
            continue
        if place == dim:
            return isinstance(one, slice)
        place += 1
    return True


def moves_rows(node: fx.Node) -> bool:
    """Return whether a call can bring rows back in their order, that an earlier call has sorted by something else."""
    return word_of(node).strip("_") in _ROW_MOVERS and len(node.all_input_nodes) > 1


def takes_sizes(node: fx.Node) -> bool:
    """Return whether a call may take the batch size as an argument and keep samples apart: it then says a shape."""
    word = word_of(node).strip("_")
    return word_of(node) in _FACTORIES or word in RESHAPES or word in MOVES or word == "getitem"

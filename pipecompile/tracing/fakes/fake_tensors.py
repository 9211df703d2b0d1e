"""Fake twins: the fake tensors that stand for parameters, constants and inputs while a model is recorded.

All twins are on one device, wherever the real tensors are. So a model whose stages are already spread over GPUs, or that
takes its inputs from the CPU, is recorded like a model on one device. A tied parameter has one twin.

`torch.tensor([h, w, loss])` makes a tensor of numbers that are not known while recording. Torch would read each number at once.
The result's shape and dtype do not depend on the numbers, so zeros stand for them; the graph makes the call with the real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from pipecompile.batching.input_layouts import layout_of, strides_of
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    forget_real_tensors,
    unset_fake_temporarily,
)
from pipecompile.tracing.fakes.lifted_numbers import LiftedNumber

__all__ = ["Twins", "recording_device", "user_attributes", "with_unknown_data"]


_OF_FAKES = frozenset(
    ("fake_device", "fake_mode", "constant", "real_tensor", *vars(FakeTensor), *FakeTensor.__annotations__)
)
"""Attributes that fake tensors have of themselves."""


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that code has set on a tensor, such as `weight.scale = 2.0`; none of a class of its own."""
    return vars(tensor) if type(tensor) in (torch.Tensor, nn.Parameter) else {}


def recording_device(model: nn.Module, leaves: Iterable[Any]) -> torch.device:
    """Return the device of all twins: that of the first parameter, else of the first input tensor, else the CPU."""
    tensors = (*model.parameters(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    return tensors[0].device if tensors else torch.device("cpu")


class Twins:
    """The twins of one recording, under one FakeTensorMode."""

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        self.fake, self.device = fake, device
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._classes: dict[int, type] = {}

    @property
    def device_contexts(self) -> tuple[torch.device, ...]:
        """The contexts in which calls without `device=` make tensors on the device of the twins."""
        return () if self.device == torch.get_default_device() else (self.device,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a parameter, buffer or constant; every time the same."""
        if id(tensor) not in self._twins:
            is_here = tensor.device == self.device
            with disable_current_modes():
                twin = self.fake.from_tensor(tensor, static_shapes=True) if is_here else self._moved(tensor)
            vars(twin).update(user_attributes(tensor))
            self._twins[id(tensor)] = tensor, twin  # keeps the tensor alive, so that its id is not used again
            self._classes[id(twin)] = type(tensor)
        return self._twins[id(tensor)][1]

    def release(self) -> None:
        """Drop the real tensors at the end of the recording: their contents may then be swapped (`torch.utils.swap_tensors`)."""
        forget_real_tensors(self.fake)

    def written_attributes(self, names: AbstractSet[str]) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
        """Return (tensor, twin, name) of the attributes of these names that differ between a tensor and its twin."""
        return [
            (tensor, twin, name)
            for tensor, twin in self._twins.values()
            for name in names & (user_attributes(tensor).keys() | vars(twin).keys())
            if name not in _OF_FAKES and user_attributes(tensor).get(name) is not vars(twin).get(name)
        ]

    def tensor_class(self, twin: torch.Tensor) -> type:
        """Return the class of the tensor that `twin` stands for."""
        plain = nn.Parameter if isinstance(twin, nn.Parameter) else torch.Tensor
        return self._classes.get(id(twin), plain)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a twin on another device than the tensor's."""
        with self.fake:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def of_input(self, leaf: torch.Tensor, dim: Any, size: Any) -> torch.Tensor:
        """Return a new twin of an input in the layout of `leaf`, with `size` samples along its batch dimension `dim`."""
        shape = tuple(size if index == dim else length for index, length in enumerate(leaf.shape))
        layout = layout_of(leaf)
        with self.fake:
            if layout is None:
                twin = torch.empty(shape, dtype=leaf.dtype, device=self.device)
            else:
                twin = torch.empty_strided(shape, strides_of(layout, shape), dtype=leaf.dtype, device=self.device)
        self._classes[id(twin)] = type(leaf)
        return twin.requires_grad_(leaf.requires_grad)


_DATA_POSITION = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}
"""Per function that makes a tensor of numbers, the position of the numbers among its arguments."""


def with_unknown_data(func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return `func`, or, if the call makes a tensor of unknown numbers, a function that makes one of zeros.

    An assignment to items does not compare sizes that the data decide. `fill_diagonal_`, which compares known shapes, fills the whole tensor. A draw of unknown shape from a generator becomes one without, since torch's operators with a generator take known shapes alone.
    """
    if func is torch.Tensor.fill_diagonal_:
        return _fill_all
    if func is torch.Tensor.__setitem__ and _has_other_sizes(args[0], args[-1]):
        return _set_element
    position = _DATA_POSITION.get(func)
    if position is None:
        is_sized_draw = "generator" in kwargs and any(
            isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves((args, kwargs))
        )
        return _without_generator(func) if is_sized_draw else func
    data = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, torch.Tensor) or not any(_is_unknown(leaf) for leaf in pytree.tree_leaves(data)):
        return func  # type: ignore[no-any-return]

    def make(*_args: Any, **_kwargs: Any) -> Any:
        with unset_fake_temporarily() as fake:
            options = {key: value for key, value in kwargs.items() if key not in ("data", "obj", "copy")}
            if func is torch.Tensor.new_tensor:
                options = {"dtype": args[0].dtype, "device": args[0].device} | options
            zeros = torch.tensor(pytree.tree_map(_zero, data), **options)
        return zeros if not isinstance(fake, FakeTensorMode) else fake.from_tensor(zeros, static_shapes=True)

    return make


def _fill_all(tensor: torch.Tensor, fill_value: Any, *_wrap: Any, **_named: Any) -> torch.Tensor:
    return tensor.fill_(fill_value)


def _has_other_sizes(target: torch.Tensor, value: Any) -> bool:
    """Return whether a value and the tensor that it is written into have sizes of different symbols: of two calls whose data decide them."""
    own, other = (_symbols(one) if isinstance(one, torch.Tensor) else frozenset() for one in (target, value))
    return bool(own - other and other - own)


def _symbols(tensor: torch.Tensor) -> frozenset[Any]:
    sizes: tuple[Any, ...] = tensor.shape
    return frozenset().union(*(size.node.expr.free_symbols for size in sizes if isinstance(size, torch.SymInt)))


def _set_element(target: torch.Tensor, index: Any, value: torch.Tensor) -> None:
    """Write one element in the place of a value. Torch would compare the sizes, which each run does again."""
    target[index] = value.new_empty(()).requires_grad_(value.requires_grad)


def _without_generator(func: Any) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **{key: value for key, value in kwargs.items() if key != "generator"})

    return draw


def _is_unknown(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool))


def _zero(leaf: Any) -> Any:
    """Return a zero of the same type for an unknown number, and a known number as it is."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros((), dtype=leaf.dtype)
    if isinstance(leaf, LiftedNumber):
        return type(leaf.number)(0)
    return leaf.node.pytype(0) if _is_unknown(leaf) else leaf

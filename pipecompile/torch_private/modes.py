"""Modes of torch: fake tensors, dispatch, autocast, gradients, oneDNN, and the transforms of `torch.func`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass, _functorch
from torch._dispatch.python import enable_python_dispatcher  # 2.11; operators decompose in Python, with symbolic sizes
from torch._guards import (  # 2.11; the FakeTensorMode on the stack, or that of tensors
    active_fake_mode,
    detect_fake_mode,
)
from torch._subclasses.fake_tensor import (  # 2.11; tensors without memory, and why an operator cannot run on them
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (  # 2.11; modes that see each operator call, and their stack
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "KnownValuesMode",
    "ObservingMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "active_fake_mode",
    "detect_fake_mode",
    "disable_current_modes",
    "dual_level",
    "enable_python_dispatcher",
    "enter_autocast",
    "exit_autocast",
    "fake_tensor_log_disabled",
    "flushes_denormals",
    "forget_real_tensors",
    "forget_values",
    "has_thread_modes",
    "is_any_autocast_enabled",
    "is_jit_tracing",
    "is_mkldnn_enabled",
    "is_transformed_tensor",
    "set_grad_enabled",
    "set_mkldnn_enabled",
    "transform_stack",
    "unset_fake_temporarily",
    "users_modes_removed",
]


class _EagerStance:
    """Compiled functions run in eager while this is begun, in all threads. `torch.compiler.set_stance` would raise inside one."""

    def __init__(self) -> None:
        self._depth, self._before, self._lock = 0, None, Lock()

    def begin(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1 and (frames := sys.modules.get("torch._dynamo.eval_frame")) is not None:
                self._before, frames._stance = frames._stance, frames.DynamoStance("force_eager")  # type: ignore[attr-defined]

    def end(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._before is not None:
                sys.modules["torch._dynamo.eval_frame"]._stance, self._before = self._before, None


_eager_stance = _EagerStance()


class ObservingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which compiled functions run in eager, so that it sees their operators.

    Torch compiles nothing under such a mode, and torch 2.11 would never again compile a function that was called under one.

    `__torch_function__` of tensor subclasses is off in the operators of torch: the engine calls them without it, and an operator that
    Python calls again would return the subclass, or call the user's code.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        _eager_stance.begin()
        return entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", None) != "aten":
            return self.observe(func, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            return self.observe(func, args, kwargs or {})

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and return its result; modes define what they note of it."""
        return func(*args, **kwargs)

    def __exit__(self, *error: object) -> None:
        _eager_stance.end()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


KNOWN_ELEMENTS = 256
"""The largest tensor, in elements, whose values are known in a recording: lists of sizes have some tens."""


class KnownValuesMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that know the values of a small tensor that is made of Python's numbers alone, as `torch.tensor(sizes)`, and of
    what is computed from it. Python may read such values. Torch itself keeps those of a single number. 2.11.
    """

    def may_turn_const(self, t: torch.Tensor) -> bool:
        is_plain = t.layout is torch.strided and t.device.type != "meta"
        return is_plain and t.numel() <= KNOWN_ELEMENTS and not self.is_our_fake(t)


def forget_values(tensors: Iterable[torch.Tensor]) -> None:
    """Let the values of fake tensors, and of all that share memory with them, be unknown: code that no mode saw wrote them. 2.11."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)


disable_current_modes = _disable_current_modes
"""Context manager that takes all function, dispatch and fake modes off the stack. 2.11."""


@contextmanager
def users_modes_removed() -> Iterator[None]:
    """Take the user's dispatch modes, such as `FlopCounterMode`, off the stack until the block ends. Torch's own stay, as fake
    tensors. 2.11.
    """
    users = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    popped = [_pop_mode() for _ in users]
    try:
        yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)


enter_autocast, exit_autocast = _enter_autocast, _exit_autocast
"""Begin and end an autocast region, as two calls that a graph can hold. 2.11."""

is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Return whether `torch.jit.trace` runs a function. 2.11."""

dual_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
"""Return the innermost level of forward-mode differentiation, -1 outside of all. 2.11."""


@contextmanager
def fake_tensor_log_disabled() -> Iterator[None]:
    """Silence torch's log of operators that fail on fake tensors: the exception says the same. 2.11."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def has_thread_modes() -> bool:
    """Return whether this thread has function modes, dispatch modes or hooks on saved tensors, which no other thread has. 2.11.

    Contexts of a default device do not count.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return True
    count = torch._C._len_torch_function_stack()
    return any(
        not isinstance(torch._C._get_function_stack_at(index), torch.utils._device.DeviceContext)
        for index in range(count)
    )


_SMALLEST = 5e-324


def flushes_denormals() -> bool:
    """Return whether the CPU computes with 0 for denormal numbers in this thread, as `torch.set_flush_denormal` has set it."""
    return _SMALLEST * 1.0 == 0.0


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switch grad mode, as one call that a graph can hold; `torch.no_grad` calls this function as well. 2.11."""

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Return True if autocast is on for any device. 2.11; bound, because each forward of a cell calls it."""

is_mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
"""Return True if oneDNN kernels may be chosen on the CPU. 2.11."""

set_mkldnn_enabled: Callable[[bool], None] = torch._C._set_mkldnn_enabled
"""Allow or forbid oneDNN. 2.11; the public `torch.backends.mkldnn.flags` sets TF32 as well, and warns."""

transform_stack: Callable[[], Any] = _functorch.peek_interpreter_stack
"""Return the innermost active transform of `torch.func`, or None. 2.11."""

is_transformed_tensor: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Return True for a tensor that a transform of `torch.func` wraps. 2.11."""


def forget_real_tensors(mode: FakeTensorMode) -> None:
    """Drop the weak references that a mode holds to the tensors it made fakes of: `torch.utils.swap_tensors` refuses tensors with any. 2.11."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()

"""The private modes of torch, seen through their public effects."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.torch_private.modes import (
    FakeTensorMode,
    ObservingMode,
    active_fake_mode,
    detect_fake_mode,
    disable_current_modes,
    enter_autocast,
    exit_autocast,
    flushes_denormals,
    is_any_autocast_enabled,
    is_jit_tracing,
    is_mkldnn_enabled,
    is_transformed_tensor,
    set_grad_enabled,
    set_mkldnn_enabled,
    transform_stack,
    unset_fake_temporarily,
    users_modes_removed,
)

pytestmark = pytest.mark.smoke


def test_an_autocast_region_is_two_calls() -> None:
    entered = enter_autocast("cpu", torch.bfloat16, True, True)
    try:
        assert is_any_autocast_enabled()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    finally:
        exit_autocast(entered)
    assert not is_any_autocast_enabled()


def test_grad_mode_is_switched_by_one_call() -> None:
    set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_whether_denormal_numbers_are_flushed_can_be_read() -> None:
    for flushes in (True, False):
        torch.set_flush_denormal(flushes)
        assert flushes_denormals() == flushes


def test_onednn_can_be_forbidden() -> None:
    before = is_mkldnn_enabled()
    set_mkldnn_enabled(False)
    try:
        assert not torch.backends.mkldnn.enabled
    finally:
        set_mkldnn_enabled(before)
    assert is_mkldnn_enabled() == before


def test_the_fake_mode_on_the_stack_and_that_of_a_tensor() -> None:
    with FakeTensorMode() as mode:
        fake = torch.ones(2)
        assert active_fake_mode() is mode
        with unset_fake_temporarily():
            assert active_fake_mode() is None
    assert active_fake_mode() is None
    assert detect_fake_mode([fake]) is mode


def test_modes_are_taken_off_the_stack() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        torch.ones(1) + 1
        seen = Counting.calls
        with disable_current_modes():
            torch.ones(1) + 1
        assert Counting.calls == seen > 0


def test_tensors_inside_a_transform_are_wrapped() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_transformed_tensor(x), transform_stack() is not None))
        return x * 2

    torch.vmap(function)(torch.ones(3))
    assert seen == [(True, True)]
    assert transform_stack() is None
    assert not is_transformed_tensor(torch.ones(1))


def test_modes_of_the_user_are_off_the_stack_and_fake_tensors_stay() -> None:
    class Noting(TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.name = name

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = torch.ones(1)
    with FakeTensorMode(), Noting("outer"), Noting("inner"):
        with users_modes_removed():
            assert active_fake_mode() is not None
            torch.ones(1)
        assert (seen, active_fake_mode() is None) == ([], False)
    with Noting("outer"), Noting("inner"):
        x.neg()
    assert seen == ["inner", "outer"]


def test_a_trace_of_torch_jit_is_seen() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_jit_tracing())
        return x + 1

    torch.jit.trace(function, torch.ones(1), check_trace=False)
    assert (seen, is_jit_tracing()) == ([True], False)


def test_a_compiled_function_that_a_mode_has_seen_is_compiled_afterwards() -> None:
    class Names(ObservingMode):  # type: ignore[no-untyped-call]
        def observe(self, func, args, kwargs):  # type: ignore[no-untyped-def]
            seen.append(func.overloadpacket.__name__)
            return func(*args, **kwargs)

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(module)
        return module.forward

    seen: list[str] = []
    compiled: list[torch.fx.GraphModule] = []
    function, x = torch.compile(lambda x: x.sin() + 1, backend=backend), torch.ones(2)
    with Names(), Names():
        function(x)
    assert (seen, compiled) == (["sin", "sin", "add", "add"], [])
    function(x)
    assert len(compiled) == 1


def test_a_backward_that_a_mode_observes_calls_no_function_of_a_subclass() -> None:
    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    seen: list[object] = []
    x, weight = torch.ones(2, 3).as_subclass(Noting), torch.ones(4, 3, requires_grad=True)
    total = torch.nn.functional.linear(x, weight).sum()
    seen.clear()
    with ObservingMode():
        torch.autograd.backward([total.as_subclass(torch.Tensor)])
    assert (type(weight.grad), seen) == (torch.Tensor, [])

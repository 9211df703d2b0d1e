"""Uses of an attribute: those that only read it, and those that may write its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipecompile.tracing.opaque.attribute_uses import is_only_read


def converted(m: Any, h: Any) -> Any:
    return h * m.scale.to(h.dtype)


def viewed(m: Any, h: Any) -> Any:
    wide = m.scale[None, :, None].float().expand(len(h), -1, 1)
    return (wide @ h) * (m.scale.unsqueeze(0) + 1), m.scale.shape[0]


def written_by_method(m: Any, h: Any) -> Any:
    m.scale.view(-1).add_(h)


def written_by_item(m: Any, h: Any) -> Any:
    m.scale[0] = h


def augmented(m: Any, h: Any) -> Any:
    m.scale += h


def replaced(m: Any, h: Any) -> Any:
    m.scale = m.scale * h


def passed_on(m: Any, h: Any) -> Any:
    h.update(m.scale)


def bound(m: Any, h: Any) -> Any:
    rows = m.scale
    rows.add_(h)


def result_of(m: Any, h: Any) -> Any:
    m.scale.mul(h, out=m.scale)


def one_of_two(m: Any, h: Any) -> Any:
    m.scale.data.copy_(h + m.scale)


def by_text(m: Any, h: Any) -> Any:
    return m.scale * h + getattr(m, "scale")  # noqa: B009


def other(m: Any, h: Any) -> Any:
    return m.rows * h


@pytest.mark.parametrize("function", [converted, viewed])
def test_reads(function: Callable[..., Any]) -> None:
    assert is_only_read(function.__code__, "scale")


@pytest.mark.parametrize(
    "function",
    [written_by_method, written_by_item, augmented, replaced, passed_on, bound, result_of, one_of_two, by_text, other],
)
def test_uses_that_may_write(function: Callable[..., Any]) -> None:
    assert not is_only_read(function.__code__, "scale")


def test_code_without_a_source_may_write() -> None:
    names: dict[str, Any] = {}
    exec("def made(m, h): return m.scale * h", names)
    assert not is_only_read(names["made"].__code__, "scale")

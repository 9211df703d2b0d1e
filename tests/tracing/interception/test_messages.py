"""A size in a message leaves the batch size free; a size in a text that decides something does not."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from bodies import Body, rows

logger = logging.getLogger(__name__)


def asserted(m, x):
    torch._assert(
        x.dim() == 2,
        f"expected two dimensions, got {x.dim()}: {x.shape}",
    )
    assert x.shape[0] > 0, f"{x.shape[0]:03d} samples"
    return m.a(x)


def raised(m, x):
    if x.shape[1] != 4:
        raise ValueError(f"{x.shape}")
    return m.a(x)


def told(m, x):
    logger.warning("a batch of %s", str(x.shape[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn(message=f"{x.shape[0]} samples {tuple(x.shape)}", stacklevel=1)
    return m.a(x)


def decides(m, x):
    return m.a(x) * {"4": 2.0}.get(f"{x.shape[0]}", 3.0)


@pytest.mark.parametrize("body", [asserted, raised, told])
def test_messages_leave_the_batch_size_free(agrees, body):
    graph = agrees(Body(body), rows(4))
    assert all(guard.holds(size) for guard in graph.facts.guards for size in (1, 2, 3, 64))


def test_a_text_that_decides_binds_it(agrees):
    graph = agrees(Body(decides), rows(4), sizes=(4,))
    assert graph.facts.batch_size == 4

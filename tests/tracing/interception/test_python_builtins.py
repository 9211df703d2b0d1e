from __future__ import annotations

import builtins
import logging
import math
import warnings

import numpy as np
import pytest
import torch
from bodies import Body, rows
from torch import nn


def numbers(m, x):
    n = x.shape[0]
    quotient, rest = divmod(n, 3)
    back, forth = divmod(17, n)
    return m.a(x) * quotient + rest + back * forth + int(n / 2) * float(n) + max(n, 2) + min(3, n, 7) + max([n, 4])


def functions_of_numbers(m, x):
    return m.a(x) / math.sqrt(x.shape[0]) + math.log2(x.shape[0]) + math.ceil(x.shape[0] / 2) + round(x.shape[0] / 3)


def windows(m, x):
    grown = m.a(x).repeat_interleave(3, 0)
    batch = int(grown.shape[0] / (9 / 3))
    return grown.view(batch, 3, -1).sum(1)


def types(m, x):
    n = x.shape[0]
    assert type(x) is torch.Tensor
    assert type(x).__name__ == "Tensor"
    assert type(n) is int
    assert isinstance(n, (int, float))
    assert isinstance(n / 2, float)
    assert type(m.a.weight) is nn.Parameter
    assert not isinstance(x, (list, tuple, nn.Parameter))
    return m.a(x) + torch.zeros(1, dtype=int)


def text_without_the_batch(m, x):
    print(x.shape, x.shape[0])
    return m.a(x) + {f"{x.shape[1]:02d}": 1}["04"]


@pytest.mark.parametrize("body", [numbers, functions_of_numbers, windows, types, text_without_the_batch])
def test_sizes_answer_as_numbers_and_stay_free(agrees, body):
    graph = agrees(Body(body), rows(4), sizes=(2, 3, 5))
    assert all(guard.holds(size) for guard in graph.facts.guards for size in (2, 3, 5, 64))


def text(m, x):
    known = {f"batch {x.shape[0]}", f"{x.shape[0]:02d}", str(x.shape[0])}
    assert known == {"batch 4", "04", "4"}
    return m.a(x)


def tables(m, x):
    return m.a(x) + {x.shape[0]: 1.0}[4] + np.sqrt(x.shape[0]) + math.gcd(x.shape[0], 2)


@pytest.mark.parametrize("body", [text, tables])
def test_where_python_must_have_the_number_the_recording_is_for_that_batch_alone(agrees, body):
    assert agrees(Body(body), rows(4), sizes=(4,)).facts.batch_size == 4


def test_everything_is_put_back_also_after_a_failure(agrees):
    before = (builtins.len, builtins.isinstance, builtins.max, math.sqrt, vars(torch.SymInt).copy())
    agrees(Body(numbers), rows(4))
    with pytest.raises(Exception, match="PC101"):
        agrees(Body(lambda m, x: m.a(x) if x.sum() > 0 else x), rows(4))
    assert before == (builtins.len, builtins.isinstance, builtins.max, math.sqrt, vars(torch.SymInt))
    assert [vars(builtins)[f"_pipecompile_{one.__name__}"] for one in (int, float, type)] == [int, float, type]


class Scaled(nn.Parameter):
    pass


def test_classes_of_tensors_are_those_that_the_author_gave(agrees):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scaled(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.scale, Scaled)
            return x * self.scale if type(self.scale) is Scaled else x

    agrees(Model(), rows(4))


# -- messages ----------------------------------------------------------------------------------------------------------

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


def logged(m, x):
    logger.warning("a batch of %s", str(x.shape[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn(message=f"{x.shape[0]} samples {tuple(x.shape)}", stacklevel=1)
    return m.a(x)


def decides(m, x):
    return m.a(x) * {"4": 2.0}.get(f"{x.shape[0]}", 3.0)


@pytest.mark.parametrize("body", [asserted, raised, logged])
def test_messages_leave_the_batch_size_free(agrees, body):
    graph = agrees(Body(body), rows(4))
    assert all(guard.holds(size) for guard in graph.facts.guards for size in (1, 2, 3, 64))


def test_a_text_that_decides_binds_it(agrees):
    graph = agrees(Body(decides), rows(4), sizes=(4,))
    assert graph.facts.batch_size == 4

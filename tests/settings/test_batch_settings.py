"""Options of a mini-batch: batch dimensions, what the loss takes, example inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn

from pipecompile.errors import InputError
from pipecompile.settings.batch_settings import BatchSettings, example_inputs


def settings(**changes: Any) -> BatchSettings:
    usual = {"n_microbatches": 4, "batch_dims": None, "loss_fn": None, "loss_reduction": "mean", "has_aux": False}
    return BatchSettings(**(usual | {"batch_norm": None, "split": None, "across_batch": None} | changes))


def test_batch_dimensions_are_a_mapping_of_ints_none_and_list() -> None:
    assert settings().batch_dims == {}
    dims = settings(batch_dims={"x": np.int64(1), "mask": None, "boxes": list}).batch_dims
    assert dims == {"x": 1, "mask": None, "boxes": list}
    assert type(dims["x"]) is int
    for value in ([("x", 1)], {0: 1}):
        with pytest.raises(InputError, match="a mapping of parameter names"):
            settings(batch_dims=value)


def test_a_split_is_a_strategy_or_a_function() -> None:
    assert settings().split == {}
    assert settings(split={"cu": "offsets", "n": "lengths"}).split == {"cu": "offsets", "n": "lengths"}
    assert settings(split={"ids": len}).split == {"ids": len}
    with pytest.raises(InputError, match=r"split\['cu'\] is 'rows'"):
        settings(split={"cu": "rows"})
    with pytest.raises(InputError, match="a mapping of parameter names"):
        settings(split=["cu"])


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (None, False),
        (lambda output: output, False),
        (lambda output, target=None: output, False),
        (lambda *args: args[0], False),
        (lambda output, target: output, True),
        (F.cross_entropy, True),
        (nn.CrossEntropyLoss(), True),
        (partial(F.cross_entropy, target=None), False),
        (max, False),  # a builtin without a signature
    ],
)
def test_a_target_is_required_if_the_loss_has_a_second_parameter(loss_fn: Callable[..., Any], expected: bool) -> None:
    assert settings(loss_fn=loss_fn).is_target_required is expected


def test_auxiliary_values_need_a_loss_function() -> None:
    assert settings(has_aux=True, loss_fn=lambda output: (output, 0)).has_aux
    with pytest.raises(InputError, match="without a loss_fn"):
        settings(has_aux=True)


def test_example_inputs_are_a_tuple_and_a_dict() -> None:
    assert example_inputs([1, 2], None) == ((1, 2), {})
    assert example_inputs((), {"x": 1}) == ((), {"x": 1})
    for args, kwargs in ((3, None), ("x", None), ((), [1]), ((), {1: 2})):
        with pytest.raises(InputError, match="example_"):
            example_inputs(args, kwargs)

"""Options of the cut: what is forced on it is checked against the model's modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from pipecompile.errors import InputError
from pipecompile.graph.cut_constraints import CutConstraints
from pipecompile.settings.cut_settings import CutSettings, check_module_name, resolve_constraints

MODEL = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2), nn.Linear(2, 2))


def settings(**changes: Any) -> CutSettings:
    usual = {"n_stages": 2, "partitioner": "auto", "time_limit": 30.0, "gap": 0.001, "plan": None, "tied": "auto"}
    return CutSettings(**(usual | {"steering": CutConstraints()} | changes))


def constraints(n_stages: int = 2, **changes: Any) -> CutConstraints:
    usual: dict[str, Any] = {"split_before": (), "keep_together": (), "pin": None, "balance": None}
    return resolve_constraints(MODEL, n_stages, **(usual | changes))


def test_the_time_limit_is_in_seconds_and_may_be_infinite() -> None:
    assert settings(time_limit=np.float32(2)).time_limit == 2.0
    assert settings(time_limit=float("inf")).time_limit == float("inf")
    for value in (-1, 0, 0.0, 5e-324, float("nan")):
        with pytest.raises(InputError, match=f"time_limit={value}"):
            settings(time_limit=value)


def test_nothing_forced_is_false() -> None:
    assert not constraints()


def test_constraints_are_made_of_every_accepted_form() -> None:
    forced = constraints(
        split_before=["1"], keep_together=["0", ["1", "2"], nn.Linear], pin={"2": np.int64(1)}, balance=np.array([1, 2])
    )
    assert forced.split_before == ("1",)
    assert forced.together[:2] == (("0",), ("1", "2"))
    assert set(forced.together[2:]) == {("0.0",), ("1",), ("2",)}
    assert forced.pins == (("2", 1),)
    assert forced.balanced == (("0", 0), ("1", 1), ("2", 1))


def test_a_pin_beyond_the_last_stage_names_its_module() -> None:
    with pytest.raises(InputError, match=r"(?s)a stage from 0 to 1 per module.*entry '2': 2"):
        constraints(pin={"1": 0, "2": 2})


def test_a_balance_that_does_not_fit_gets_one_that_does() -> None:
    for balance in ([3], [1, 1], [1.5, 1.5]):
        with pytest.raises(InputError) as caught:
            constraints(balance=balance)
        assert caught.value.hint == "balance=[2, 1]"


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)no Conv2d.*Linear, ReLU, Sequential"):
        constraints(keep_together=[nn.Conv2d])


def test_only_names_that_no_node_can_have_are_refused_early() -> None:
    check_module_name("pin", "0.1", MODEL)
    check_module_name("pin", "add_1", MODEL)
    with pytest.raises(InputError, match=r"(?s)no module '0\.7'.*'0\.[01]' in its place"):
        check_module_name("pin", "0.7", MODEL)


def test_a_module_is_known_by_all_its_names() -> None:
    shared = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    shared[1][0] = shared[0][0]
    check_module_name("pin", "1.0", shared)


def test_a_balance_leaves_no_stage_empty() -> None:
    with pytest.raises(InputError, match="children per stage") as caught:
        constraints(balance=[0, 3])
    assert caught.value.hint == "balance=[2, 1]"
    with pytest.raises(InputError, match="adds up to 4") as caught:
        constraints(4, balance=[1, 1, 1, 1])
    assert caught.value.hint == "n_stages=3, or no balance"

"""Options of the machine: per-device values have one entry per device, and links come from the bandwidth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.schedules import build_schedule
from pipecompile.settings.machine_settings import (
    MachineSettings,
    default_device_count,
    optimizer_copies,
    resolve_devices,
)

CPU = torch.device("cpu")


def settings(**changes: Any) -> MachineSettings:
    usual = {"devices": (CPU, CPU), "memory_limit": None, "optimizer_state": 0, "speeds": None, "bandwidth": None}
    return MachineSettings(**(usual | {"cost": "auto", "costs": None} | changes))


def test_values_per_device_become_tuples_of_numbers() -> None:
    limits = settings(memory_limit=[np.float32(2), 3])
    assert limits.memory_limit == (2.0, 3)
    assert settings(memory_limit=5).memory_limit == 5
    assert settings(memory_limit=float("inf")).memory_limit is None
    assert settings(memory_limit=[1e9, float("inf")]).memory_limit == (1e9, 2.0**60)
    assert settings(speeds=np.array([1.0, 0.5])).speeds == (1.0, 0.5)


@pytest.mark.parametrize("name", ["memory_limit", "speeds"])
def test_there_is_one_entry_per_device_and_the_hint_has_as_many(name: str) -> None:
    for value, hint in (([1.0], "[1.0, 1.0]"), ([1.0, 2.0, 3.0], "[1.0, 2.0]")):
        with pytest.raises(InputError, match=f"one entry per pipeline device: {len(value)} for 2") as caught:
            settings(**{name: value})
        assert caught.value.hint == f"{name}={hint}"


def test_a_bandwidth_is_a_number_or_a_square_whose_diagonal_is_not_used() -> None:
    assert settings(bandwidth=np.float64(1e9)).bandwidth == 1e9
    assert settings(bandwidth=[[0, 2e9], [1e9, "unused"]]).bandwidth == ((1.0, 2e9), (1e9, 1.0))
    with pytest.raises(InputError, match="2 by 2 square"):
        settings(bandwidth=[[1.0]])
    with pytest.raises(InputError, match="a square"):
        settings(bandwidth=[[1.0, 1.0], [1.0]])
    with pytest.raises(InputError, match="between any two devices"):
        settings(bandwidth=[[0, 0], [1e9, 0]])


def test_links_differ_by_pair_where_the_bandwidth_does() -> None:
    assert settings().links.seconds_per_byte == 0
    assert settings(bandwidth=1e9).links.seconds_per_byte == 1e-9
    assert settings(bandwidth=[[0, 2e9], [1e9, 0]]).links.factors == ((0.0, 1.0), (2.0, 0.0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False), ({"bandwidth": 1e9}, False), ({"bandwidth": [[0, 1.0], [2.0, 0]]}, True), ({"speeds": [1, 1]}, True),
        ({"memory_limit": 1e9}, True),
    ],
)  # fmt: skip
def test_devices_are_unequal_if_the_cut_depends_on_which_one_a_stage_is_on(
    changes: dict[str, Any], expected: bool
) -> None:
    assert settings(**changes).has_unequal_devices is expected


def test_costs_are_seconds_of_modules_or_a_function() -> None:
    assert settings(costs={"head": np.float32(0.5)}).costs == {"head": 0.5}
    assert settings(costs=len).costs is len
    with pytest.raises(InputError, match="entry 'head': -1"):
        settings(costs={"body": 1.0, "head": -1})


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_limit": 1e308}, {"memory_limit": [1e9, 5e-324]}, {"speeds": [1e-308, 1]}, {"bandwidth": 5e-324},
        {"bandwidth": [[0, 1e308], [1, 0]]}, {"costs": {"0": 1e308}},
    ],
)  # fmt: skip
def test_numbers_too_large_or_too_small_to_compute_with_are_refused_by_option(changes: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=rf"(?s){next(iter(changes))}=\S+ is (more than 1e\+40|less than 1e-40).*why.*try"
    ):
        settings(**changes)


def test_an_optimizer_is_named_or_passed() -> None:
    adam = torch.optim.Adam(nn.Linear(2, 2).parameters())
    assert [optimizer_copies(each) for each in (None, "adam", adam, torch.optim.SGD)] == [0, 2, 2, 0]
    with pytest.raises(InputError, match="'adam'"):
        optimizer_copies("adma")
    with pytest.raises(InputError, match="the name of an optimizer"):
        optimizer_copies(3)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [("1f1b", 6), ("gpipe", 6), ("auto", 6), ("zbv", 3), ("v-min", 3), (build_schedule("gpipe", 6, 4, n_devices=2), 2)],
)
def test_without_devices_there_are_as_many_as_the_schedule_takes(schedule: str, count: int) -> None:
    assert default_device_count(schedule, 6) == count


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("pipecompile.settings.machine_settings.accelerator_type", lambda: "cuda")
    monkeypatch.setattr("pipecompile.settings.machine_settings.accelerator_indices", lambda: range(count))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0, ["cpu"] * 4),
        (1, ["cuda:0"] * 4),
        (2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        (8, [f"cuda:{i}" for i in range(4)]),
    ],
)
def test_neighbouring_stages_share_a_gpu_if_there_are_few(
    gpus: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, gpus)
    assert list(map(str, resolve_devices(None, 4))) == expected


def test_devices_have_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    devices = resolve_devices(["cpu:0", "cuda", torch.device("cuda:1")], 3)
    assert list(map(str, devices)) == ["cpu", "cuda:0", "cuda:1"]
    with pytest.raises(InputError, match=r"(?s)no device cuda:2 here.*entry 1.*cpu, cuda:0, cuda:1"):
        resolve_devices(["cpu", "cuda:2"], 2)


@pytest.mark.parametrize("devices", ["cpu", [], 2, torch.device("cpu"), {"cpu"}])
def test_other_than_a_list_is_refused_with_a_list_to_paste(devices: object) -> None:
    with pytest.raises(InputError, match=r'devices=\["cpu"\] \* 2'):
        resolve_devices(devices, 4, "zbv")


def test_nothing_is_measured_where_a_function_gives_all_costs() -> None:
    with pytest.raises(InputError, match='cost="profile" is given together with a function'):
        settings(cost="profile", costs=lambda graph, inputs: {})
    assert settings(cost="profile", costs={"fc": 1.0}).costs == {"fc": 1.0}
    assert callable(settings(cost="analytic", costs=lambda graph, inputs: {}).costs)

"""The pipeline devices: as the keyword lists them, else the machine's."""

from __future__ import annotations

import pytest
import torch

from pipecompile.errors import InputError
from pipecompile.schedules import build_schedule
from pipecompile.settings.pipeline_devices import default_device_count, resolve_devices


@pytest.mark.parametrize(
    ("schedule", "count"),
    [("1f1b", 6), ("gpipe", 6), ("auto", 6), ("zbv", 3), ("v-min", 3), (build_schedule("gpipe", 6, 4, n_devices=2), 2)],
)
def test_without_devices_there_are_as_many_as_the_schedule_takes(schedule: str, count: int) -> None:
    assert default_device_count(schedule, 6) == count


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
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert list(map(str, resolve_devices(None, 4))) == expected


def test_devices_have_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    devices = resolve_devices(["cpu:0", "cuda", torch.device("cuda:1")], 3)
    assert list(map(str, devices)) == ["cpu", "cuda:0", "cuda:1"]
    with pytest.raises(InputError, match=r"(?s)no device cuda:2 here.*entry 1.*cpu, cuda:0, cuda:1"):
        resolve_devices(["cpu", "cuda:2"], 2)


@pytest.mark.parametrize("devices", ["cpu", [], 2, torch.device("cpu"), {"cpu"}])
def test_other_than_a_list_is_refused_with_a_list_to_paste(devices: object) -> None:
    with pytest.raises(InputError, match=r'devices=\["cpu"\] \* 2'):
        resolve_devices(devices, 4, "zbv")

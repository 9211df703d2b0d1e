"""From options as typed to arguments of compile."""

from __future__ import annotations

import pytest
from torch import nn

from pipecompile.cli.compile_options import CompileOptions, with_classes
from pipecompile.errors import InputError, ScheduleError
from pipecompile.schedules import build_schedule


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"memory_limit": "16GiB"}, "memory_limit", 16 * 2**30),
        ({"memory_limit": "500MB"}, "memory_limit", 500_000_000),
        ({"memory_limit": "1KiB, 2kB"}, "memory_limit", [1024, 2000]),
        ({"bandwidth": "16GB/s"}, "bandwidth", 16_000_000_000),
        ({"speeds": "1, .5"}, "speeds", [1.0, 0.5]),
        ({"devices": "cpu,cuda:0"}, "devices", ["cpu", "cuda:0"]),
        ({"split_before": ["a.b,c", "d"]}, "split_before", ["a.b", "c", "d"]),
        ({"keep_together": ["a, b", "c"]}, "keep_together", [["a", "b"], "c"]),
        ({"pin": ["a.b=0,c=12", "a.b=0"]}, "pin", {"a.b": 0, "c": 12}),
        ({"checkpoint": "1,0,1"}, "checkpoint", (True, False, True)),
        ({"checkpoint": "1"}, "checkpoint", (True,)),
        ({"checkpoint": "except_last"}, "checkpoint", "except_last"),
        ({"cuda_graphs_step": True}, "cuda_graphs", "step"),
        ({}, "n_stages", 4),
        ({"balance": "2,0,1"}, "n_stages", 3),
        ({"balance": "2,0,1", "stages": 5}, "n_stages", 5),
    ],
)
def test_what_is_typed_becomes_an_argument(options, name, value):
    assert CompileOptions(**options).arguments()[name] == value


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory_limit": "16GiB,"}, "'' is not a size"),
        *(
            ({name: ""}, f"--{name.replace('_', '-')} '' is empty")
            for name in ("devices", "compile_stages", "optimizer")
        ),
        ({"split_before": ["a", ""]}, "--split-before '' is empty"),
        ({"bandwidth": "fast"}, "'fast' is not a size"),
        (
            {"bandwidth": "none.csv"},
            "(?s)cannot be read.*none.csv\n  why    No such file or directory\n  try    a line per device",
        ),
        ({"speeds": "1,x"}, "--speeds '1,x' is not a list of numbers"),
        ({"balance": "1.5"}, "--balance '1.5' is not a list of whole numbers"),
        ({"pin": ["a"]}, "--pin 'a' is not a module"),
        ({"pin": ["=3"]}, "--pin '=3' is not a module"),
        ({"pin": ["a=-1"]}, "--pin 'a=-1' is not a module"),
        ({"pin": ["a=0", "a=1"]}, "--pin puts 'a' into stage 0 and into stage 1"),
    ],
)
def test_what_cannot_be_read_is_refused(options, told):
    with pytest.raises(InputError, match=told):
        CompileOptions(**options).arguments()


def test_a_schedule_of_ones_own_says_how_many_stages(tmp_path):
    built = build_schedule("zbv", 6, 4)
    built.save(tmp_path / "mine.csv")
    found = CompileOptions(schedule=str(tmp_path / "mine.csv")).arguments()
    assert found["schedule"].rows == built.rows
    assert found["n_stages"] == 6
    with pytest.raises(ScheduleError, match=r"none\.csv"):
        CompileOptions(schedule="none.csv").arguments()


def test_bandwidths_of_pairs_are_a_file(tmp_path):
    (tmp_path / "links.csv").write_text("0,16GB\n1e9,0\n")
    path = str(tmp_path / "links.csv")
    assert CompileOptions(bandwidth=path).arguments()["bandwidth"] == [[0, 16_000_000_000], [1_000_000_000, 0]]
    (tmp_path / "links.csv").write_text("0,fast\n")
    with pytest.raises(InputError, match=r"(?s)'fast' is not a size.*links\.csv"):
        CompileOptions(bandwidth=path).arguments()


def test_a_class_stands_for_its_modules_unless_a_module_has_its_name():
    class Linear(nn.Linear):
        """Another class of the same name."""

    model = nn.Sequential(nn.Linear(2, 2), Linear(2, 2), nn.ReLU())
    assert with_classes(model, ["Linear", "1", ["0", "ReLU"], "Tanh"]) == [
        nn.Linear,
        Linear,
        "1",
        ["0", "ReLU"],
        "Tanh",
    ]
    model.add_module("ReLU", nn.Identity())
    assert with_classes(model, ["ReLU", "Sequential"]) == ["ReLU", "Sequential"]

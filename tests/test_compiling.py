"""`compile` refuses every bad argument by a message of one form, before it changes or measures anything."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile import compiling
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule

X = torch.randn(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def build(model: Any = None, n_stages: Any = 2, **keywords: Any) -> pc.Pipeline:
    usual = {"example_args": (X,), "cost": "analytic", "loss_fn": F.cross_entropy, "devices": ["cpu", "cpu"]}
    return pc.compile(Net() if model is None else model, n_stages, **(usual | keywords))


@dataclass(frozen=True)
class Bad:
    """A refused value with words of its message; `beside` are keywords that must go with it."""

    value: Any
    words: str
    error: type[pc.PipecompileError] = pc.InputError
    beside: tuple[tuple[str, Any], ...] = ()


def three_stages() -> pc.Plan:
    return build(n_stages=3, devices=["cpu"] * 3).plan


NAN, INF, SCHEDULE, PLAN = float("nan"), float("inf"), pc.ScheduleError, pc.PlanError
AUTO = (("n_microbatches", "auto"),)

NO_COUNT = [
    Bad(value, "a whole number of at least 1") for value in (0, -3, 1.5, True, "two", None, [2], X, np.bool_(True))
]
NO_FLAG = [Bad(value, "True or False") for value in (1, 0, "yes", None, X, [True])]
NO_LIST = [Bad(value, "per device") for value in ([1.0, -1.0], [1.0, "2"], [1.0, True], [1.0, None], [1.0, NAN])]

REFUSED: dict[str, list[Bad]] = {
    "model": [Bad(F.relu, "not an nn.Module"), Bad(Net, "not an nn.Module"), Bad(nn.LazyLinear(2), "without a shape")],
    "n_stages": NO_COUNT,
    "example_args": [Bad(value, "a tuple of arguments") for value in (X, "x", 3, None, {"x": X})],
    "example_kwargs": [Bad(value, "a mapping of parameter names") for value in (X, "x", [X], {1: X})],
    "n_microbatches": [
        *[Bad(value, "a whole number of at least 1, nor 'auto'") for value in (0, -1, 2.5, True, "atuo", [4], X)],
        Bad("auto", "a Schedule", beside=(("schedule", build_schedule("gpipe", 2, 4)),)),
        Bad("auto", "costs in seconds", beside=(("costs", {"head": 1e-3}),)),
    ],
    "split": [
        *[Bad(value, "a mapping of parameter names") for value in (3, "x", X, [("x", "offsets")], {0: "offsets"})],
        Bad({"x": "rows"}, '"offsets"'), Bad({"x": None}, '"offsets"'), Bad({"maks": "offsets"}, 'split={"mask": ...}'),
    ],
    "batch_dims": [
        Bad(3, "a mapping of parameter names"), Bad("x", "a mapping of parameter names"), Bad({"x": "1"}, "a dimension"),
        Bad({0: 1}, "a mapping of parameter names"),
        Bad({"x": True}, "a dimension"), Bad({"x": 1.0}, "a dimension"), Bad({"maks": None}, 'batch_dims={"mask": None}'),
    ],
    "schedule": [
        *[Bad(value, "a function that builds one", SCHEDULE) for value in (3, None, ["1f1b"], X, True)],
        Bad("1F1B", "schedule='1f1b'", SCHEDULE), Bad("gpip", "schedule='gpipe'", SCHEDULE),
        Bad("none.csv", "cannot be read", SCHEDULE), Bad(Path("none.csv"), "cannot be read", SCHEDULE),
        Bad(build_schedule("1f1b", 3, 4), "3 stages on 3 devices, not 2 on 2", SCHEDULE),
        Bad(pc.Schedule.from_csv("0B0,0F0\n1F0,1B0\n"), "->", pc.VerifyError),
        Bad("none.txt", "cannot be read", SCHEDULE), Bad(lower(build_schedule("1f1b", 3, 4)), "3 stages on 3 devices", SCHEDULE),
        Bad(replace(lower(build_schedule("1f1b", 2, 4)), rows=((), ())), "never runs F", pc.VerifyError),
        Bad(lambda *counts: [["0F0"]], "not a Schedule", SCHEDULE), Bad("zbv", "devices= with 1 entry", SCHEDULE),
    ],
    "devices": [
        *[Bad(value, "a list of devices") for value in ("cpu", [], 2, torch.device("cpu"), {"cpu": 2})],
        Bad(["cpu", "gpu"], "'gpu' is not a device"), Bad(["cpu", 3], "3 is not a device"), Bad(["cpu", None], "None is not"),
        Bad(["cpu", "cuda:99"], "no device cuda:99"), Bad(["cpu", "meta"], "no device meta"),
        Bad(["cpu"] * 3, "devices= with 2 entries", SCHEDULE),
    ],
    "mesh": [Bad(value, "a torch.distributed.device_mesh.DeviceMesh") for value in (3, "pp", [0, 1], X)],
    "lost_copies": [Bad("contineu", "lost_copies='continue'"), *[Bad(value, "is not known") for value in (None, True, 1, X)]],
    "loss_fn": [Bad(value, "a function") for value in ("cross_entropy", 3, X, [F.cross_entropy])],
    "loss_reduction": [Bad("maen", "loss_reduction='mean'"), *[Bad(value, "is not known") for value in (None, 1, X, ["sum"])]],
    "partitioner": [Bad("lip", "partitioner='ilp'"), *[Bad(value, "is not known") for value in (None, 1, X, "ILP")]],
    "cost": [Bad("analytc", "cost='analytic'"), *[Bad(value, "is not known") for value in (None, 1, True, X)]],
    "costs": [
        *[Bad(value, "a mapping of module names to seconds") for value in (3, "head", X, ["head"])],
        *[Bad({"head": seconds}, "entry 'head'") for seconds in (-1.0, "1", True, NAN, INF, None)],
        Bad({"first.iner": 1.0}, "'first.inner'"),
    ],
    "memory_limit": [
        *[Bad(value, "a number above 0") for value in (0, -1.0, "16GiB", True, NAN, X)], *NO_LIST,
        Bad([1e9] * 3, "3 for 2"), Bad([], "0 for 2"),
    ],
    "optimizer": [
        Bad("adma", "'adam'"), Bad(3, "the name of an optimizer"), Bad(True, "the name of an optimizer"),
        Bad(X, "the name of an optimizer"), Bad(nn.Linear, "is not known"),
    ],
    "speeds": [*NO_LIST, *[Bad(value, "per device") for value in (2.0, "fast", [1.0, INF], {"cpu": 1.0})], Bad([1.0], "1 for 2")],
    "bandwidth": [
        *[Bad(value, "a number above 0") for value in (0, -1.0, "16GB", True, NAN, X)],
        Bad([[1.0]], "2 by 2 square"), Bad([[1.0, 2.0], [3.0]], "a square"), Bad([], "a square"), Bad([1.0, 2.0], "a square"),
        *[Bad([[0, value], [1e9, 0]], "between any two devices") for value in (0, "1", True, NAN)],
    ],
    "split_before": [
        *[Bad(value, "names of modules") for value in ("head", 3, [3], [None], {"head": 1})], Bad(["first.iner"], "'first.inner'"),
    ],
    "keep_together": [
        *[Bad(value, "names") for value in ("head", 3, [3], [["head", 3]], {"head": 1})],
        Bad([["head", "first.iner"]], "'first.inner'"), Bad([nn.Conv2d], "no Conv2d"),
    ],
    "pin": [
        *[Bad(value, "a mapping of names of modules") for value in ("head", 3, ["head"], X)],
        *[Bad({"head": stage}, "a stage from 0 to 1") for stage in (2, -1, True, "0", 0.0, None)],
        Bad({3: 0}, "a stage from 0 to 1"), Bad({"first.iner": 0}, "'first.inner'"),
    ],
    "balance": [
        *[Bad(value, "children per stage") for value in ("21", 3, [1.5, 1.5], [True, 2], [-1, 4], ["1", 2])],
        Bad([1, 1, 1], "3 for 2"), Bad([3], "1 for 2"), Bad([1, 1], "adds up to 2, the model has 3 children"),
    ],
    "plan": [
        *[Bad(value, "a plan nor the path of one") for value in (3, True, {"n_stages": 2}, X)],
        Bad("none.json", "none.json", PLAN), Bad(Path("none.json"), "none.json", PLAN), Bad(three_stages, "the plan has 3 stages"),
    ],
    "dispatch": [Bad("thread", "dispatch='threads'"), *[Bad(value, "is not known") for value in (None, 1, X)]],
    "passes": [
        *[Bad(value, "a list of pc.UserPass or functions") for value in ("mine", 3, None, len)],
        Bad(["mine"], "entry 0: 'mine'"), Bad([len, len], "two passes are called 'len'"),
        Bad([len], "a Program", beside=(("schedule", lower(build_schedule("1f1b", 2, 4))),)),
        Bad([len], "exact", beside=(("across_batch", "exact"), ("schedule", "gpipe"))),
    ],
    "gradient_sums": [Bad("devices", "gradient_sums='device'"), *[Bad(value, "is not known") for value in (None, True, X)]],
    "time_limit": [Bad(value, "a number above 0") for value in (-1, 0, "30", None, True, NAN, X, [30])],
    "gap": [*[Bad(value, "a finite number of at least 0") for value in (-1, "0", None, True, NAN, INF)], Bad(1, "below 1")],
    "tied": [Bad("togehter", "tied='together'"), *[Bad(value, "is not known") for value in (None, True, X)]],
    "checkpoint": [
        Bad("allways", "checkpoint='always'", SCHEDULE), Bad([True] * 3, "3 flags for 2 stages", SCHEDULE),
        *[Bad(value, "a flag per stage", SCHEDULE) for value in (True, None, 1, ["never", "always"], [2, 0], [None, None])],
    ],
    "restored": NO_COUNT,
    "offload": [
        *NO_FLAG, Bad(True, "recomputed or offloaded", beside=(("checkpoint", "always"),)), Bad(True, "without copies", beside=(("schedule", "auto"),)),
        Bad(True, "two programs", beside=(("across_batch", "exact"), ("schedule", "gpipe"))),
        Bad(True, "a Program", beside=(("schedule", lower(build_schedule("1f1b", 2, 4))),)),
    ],
    "reshard_after_forward": [*NO_FLAG, Bad(True, "without a mesh that has dp_shard")],
    "batch_norm": [Bad("sync", "is not known"), Bad("defered", "batch_norm='deferred'"), Bad(True, "is not known")],
    "across_batch": [Bad("all", "is not known"), Bad("exact", 'schedule="gpipe"', error=pc.ScheduleError)],
    "has_aux": [*NO_FLAG, Bad(True, "without a loss_fn", beside=(("loss_fn", None),))],
    "compile_stages": [*[Bad(value, "True or False") for value in (1, None, X, ["eager"])], Bad("inductr", "inductor")],
    "cuda_graphs": [
        *[Bad(value, "True or False") for value in (1, None, X)], Bad("steps", 'or "step"'),
        Bad("step", "one thread launches a whole step", beside=(("dispatch", "threads"),)),
    ],
    "check": [
        *[Bad(value, "every:N") for value in ("every", "every:", "every:0", "every:-1", "every:2.5", "always")],
        *[Bad(value, "True or False") for value in (1, None, X, ["every:2"])],
    ],
    "cache_size": NO_COUNT,
    "progress": NO_FLAG,
    "init": [Bad(3, "init is an int"), Bad([3], "init is an int"), Bad("none", "none does not exist"), Bad(nn.init.ones_, "no tensor of the model is on meta")],
}  # fmt: skip
"""Per keyword of `compile`, wrong types, values, lengths and names. A keyword without a row fails the first test."""

ROWS = [pytest.param(name, bad, id=f"{name}-{i}") for name, rows in REFUSED.items() for i, bad in enumerate(rows)]


def test_every_keyword_has_a_row() -> None:
    assert set(REFUSED) == set(inspect.signature(pc.compile).parameters)


@pytest.mark.parametrize(("name", "bad"), ROWS)
def test_a_bad_argument_is_refused_before_anything_changes(
    name: str, bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = bad.value() if bad.value is three_stages else bad.value
    reached: list[str] = []
    monkeypatch.setattr(compiling, "keep_freed_memory", lambda: reached.append("the heap is set"))
    monkeypatch.setattr(pc.Pipeline, "prepare", lambda *_: reached.append("the model is compiled"))
    model = value if name == "model" else Net()
    before = [(id(tensor), tensor.data_ptr()) for tensor in model.parameters()] if isinstance(model, Net) else []
    with pytest.raises(bad.error) as caught:
        build(model, **({} if name == "model" else {name: value}), **dict(bad.beside))
    assert bad.words in str(caught.value)
    assert reached == []
    if isinstance(model, Net):
        assert [(id(tensor), tensor.data_ptr()) for tensor in model.parameters()] == before


@pytest.mark.parametrize(("name", "bad"), ROWS)
def test_a_refusal_names_the_argument_and_what_to_try(name: str, bad: Bad) -> None:
    value = bad.value() if bad.value is three_stages else bad.value
    with pytest.raises(bad.error) as caught:
        build(value if name == "model" else None, **({} if name == "model" else {name: value}), **dict(bad.beside))
    error = caught.value
    if isinstance(error, pc.VerifyError):
        return  # a picture with all faults instead
    assert name in str(error) or str(value) in str(error)
    assert error.hint or isinstance(error, pc.PlanError | pc.ScheduleError), error
    assert len(error.what) < 300, "a large value is shortened"


ACCEPTED: dict[str, list[Any]] = {
    "n_stages": [np.int64(2)],
    "n_microbatches": [np.int32(4), "auto"],
    "batch_dims": [{"x": np.int64(0)}, {"mask": None}, None],
    "split": [{"mask": "offsets"}, {"mask": len}, {}, None],
    "memory_limit": [np.float32(1e12), np.int64(10**12), [np.float64(1e12), 10**12], INF],
    "speeds": [np.array([1.0, 2.0]), (1, 2), [np.int8(1), np.float16(2)]],
    "bandwidth": [np.float64(1e9), [[0, 1e9], [np.int64(10**9), NAN]]],
    "pin": [{"head": np.int64(1)}],
    "balance": [[np.int64(1), 2], np.array([2, 1])],
    "costs": [{"head": np.float32(1e-3)}, {"head": 0}],
    "restored": [np.uint8(2)],
    "cache_size": [np.int16(3)],
    "time_limit": [np.float32(3), 1, INF],
    "gap": [np.float32(0.01), 0],
    "checkpoint": [[np.bool_(True), False], (1, 0)],
    "has_aux": [np.bool_(False)],
    "example_kwargs": [{"mask": None}],
    "keep_together": [["first", ["second", "head"], Block], ()],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_numbers_of_numpy_and_sequences_are_accepted(name: str, value: Any) -> None:
    pipe = build(**({"example_args": (), name: value} if name != "example_kwargs" else {name: value}))
    assert isinstance(pipe._options.n_stages, int)
    assert type(pipe._options.cache_size) is int


def test_an_unknown_keyword_is_a_type_error_of_python() -> None:
    with pytest.raises(TypeError, match="n_microbatch"):
        build(n_microbatch=4)


@pytest.mark.parametrize(
    "keywords",
    [{"pin": {"haed": 1}}, {"split_before": ["haed"]}, {"keep_together": ["haed"]}, {"costs": {"haed": 1e-3}}],
)
def test_names_are_compared_with_the_recording_before_costs_are_measured(
    keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipecompile.driver.phases.measure_costs", lambda *_: pytest.fail("costs are measured"))
    with pytest.raises(pc.InputError, match="'head'"):
        build(**keywords)


def test_example_inputs_that_disagree_are_refused_before_the_heap_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "keep_freed_memory", lambda: pytest.fail("the heap is set"))
    with pytest.raises(pc.InputError, match="disagree"):
        build(example_args=(X, X[:5]))


def test_the_heap_is_set_for_stages_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(compiling, "keep_freed_memory", lambda: calls.append(None))
    build(example_args=())
    assert len(calls) == 1


def test_the_docstring_has_every_keyword_once() -> None:
    text = inspect.getdoc(pc.compile) or ""
    for name in list(inspect.signature(pc.compile).parameters)[2:]:
        assert text.count(f"\n- `{name}`: ") == 1, name

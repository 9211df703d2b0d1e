"""Any value for any argument of a public function is taken, or refused by an error of ours: never a bare exception, never a long wait."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from odd_values import VALUES, Odd
from refusals import failures
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc
from pipecompile.ir.action import Action, Kind
from pipecompile.passes import lower
from pipecompile.schedules import CATALOGUE
from pipecompile.simulation.costs import CostOptions

Call = Callable[..., Any]

SCHEDULE = pc.build_schedule("1f1b", 2, 4)
PERIODIC = pc.build_periodic("1f1b", 2, 16)
PERIODIC_PROGRAM = pc.lower_periodic(PERIODIC)
PROGRAM = lower(SCHEDULE)
ORDER = pc.read_schedule("deepspeed:TrainSchedule", n_ranks=2, n_microbatches=4)
X, TARGET = torch.randn(8, 4), torch.randn(8, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def compiled(model: Any = None, n_stages: Any = 2, **options: Any) -> pc.Pipeline:
    defaults: dict[str, Any] = {"example_args": (X,), "cost": "analytic", "loss_fn": mse_loss}
    return pc.compile(net() if model is None else model, n_stages, **{**defaults, **options})


@cache
def pipe() -> pc.Pipeline:
    return compiled(devices=["cpu"] * 2)


@cache
def rescheduled() -> pc.Pipeline:
    return compiled()


@cache
def optimizer() -> torch.optim.Optimizer:
    pipe().step(X, target=TARGET)
    adam = torch.optim.Adam(pipe().parameters())
    adam.step()
    return adam


@cache
def problem() -> Any:
    return compiled().problem


@cache
def part() -> Any:
    return pc.partition(problem(), 2)


def parameters(function: Call) -> list[str]:
    """Return the names of the arguments of a function, those of costs among them."""
    given = inspect.signature(function).parameters.values()
    names = [one.name for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    if any(one.kind is one.VAR_KEYWORD and one.name == "parts" for one in given):
        return []
    has_costs = any(one.kind is one.VAR_KEYWORD and one.name == "costs" for one in given)
    return [*names, *(CostOptions.__annotations__ if has_costs else ())]


KEEP = object()
"""In place of an argument: the value that is right, made when it is needed."""


def in_parts(data: Any) -> dict[str, Any]:
    """Return the fields of a frozen dataclass, to replace one."""
    return {field.name: getattr(data, field.name) for field in fields(data) if field.init}


FUNCTIONS: Mapping[str, tuple[Call, dict[str, Any]]] = {
    "auto_schedule": (pc.auto_schedule, {"n_stages": 2, "n_microbatches": 4, "effort": 0.01}),
    "build_schedule": (pc.build_schedule, {"schedule": "1f1b", "n_stages": 2, "n_microbatches": 4}),
    "read_schedule": (pc.read_schedule, {"source": "deepspeed:TrainSchedule", "n_ranks": 2, "n_microbatches": 4}),
    "check_order": (pc.check_order, {"order": SCHEDULE, "rules": "pair"}),
    "repair_order": (pc.repair_order, {"order": SCHEDULE}),
    "simulate": (pc.simulate, {"subject": SCHEDULE}),
    "forecast": (pc.forecast, {"subject": SCHEDULE, "jitter": 0.1, "draws": 2}),
    "calibrate": (pc.calibrate, {"measured": pc.simulate(SCHEDULE)}),
    "advise": (pc.advise, {"subject": SCHEDULE}),
    "insert_offload": (pc.insert_offload, {"schedule": SCHEDULE, "stages": None}),
    "insert_overlap": (pc.insert_overlap, {"schedule": SCHEDULE, "routes": None}),
    "insert_sharding": (pc.insert_sharding, {"schedule": SCHEDULE, "stages": None, "ahead": 1}),
    "build_periodic": (pc.build_periodic, {"schedule": "1f1b", "n_stages": 2, "n_microbatches": 8}),
    "find_period": (pc.find_period, {"schedule": SCHEDULE}),
    "unroll": (pc.unroll, {"program": pc.lower_periodic(pc.build_periodic("1f1b", 2, 8)), "repetitions": 2}),
    "offload_to_fit": (pc.offload_to_fit, {"schedule": SCHEDULE, "memory_limit": 8.0, "saved_bytes": 3.0}),
    "shard_to_fit": (pc.shard_to_fit, {"schedule": SCHEDULE, "memory_limit": 8.0, "unsharded_bytes": 3.0}),
    "plan_for": (pc.plan_for, {"model": net(), "cluster": "2xH100", "example_args": (X,)}),
    "simulate_launches": (pc.simulate_launches, {"program": lower(SCHEDULE)}),
    "verify": (pc.verify, {"subject": SCHEDULE}),
    "save_chakra": (pc.save_chakra, {"program": lower(SCHEDULE), "path": "step", "timeline": None}),
    "latest_checkpoint": (pc.latest_checkpoint, {}),
    "save_checkpoint": (lambda state, directory, step, keep, asynchronous: pc.save_checkpoint(
        state, directory, step, keep=keep, asynchronous=asynchronous).result(),
        {"state": {}, "directory": "out", "step": 1, "keep": None, "asynchronous": False}),
    "register_schedule": (lambda name, build: pc.register_schedule(name, build), {"name": "gpipe", "build": Odd}),
    "partition": (lambda problem_, n_stages, method, time_limit, gap: pc.partition(
        problem() if isinstance(problem_, str) and problem_ == "own" else problem_, n_stages, method=method, time_limit=time_limit, gap=gap),
        {"problem_": "own", "n_stages": 2, "method": "auto", "time_limit": 1.0, "gap": 0.0}),
    "trace": (lambda model, x, batch_dims: pc.trace(model, x, batch_dims=batch_dims), {"model": net(), "x": X, "batch_dims": None}),
    "explain": (lambda model, x: pc.explain(model, x), {"model": net(), "x": X}),
    "step": (lambda x, target, scaler: pipe().step(x, target=target, scaler=scaler), {"x": X, "target": TARGET, "scaler": None}),
    "step in lists": (lambda microbatches: pipe().step(microbatches=microbatches), {}),
    "step in a list": (lambda one: pipe().step(microbatches=[one]), {}),
    "forward": (lambda x: pipe()(x), {}),
    "evaluate": (lambda batches: pipe().evaluate(batches), {}),
    "evaluate a batch": (lambda batch: pipe().evaluate([batch]), {}),
    "prepare": (lambda x: pipe().prepare(x), {}),
    "reschedule": (lambda schedule, count: rescheduled().reschedule(schedule, count), {"schedule": "gpipe", "count": 2}),
    "dump": (lambda directory: pipe().dump(directory), {}),
    "report": (lambda path: pipe().report(path), {}),
    "lower_periodic": (pc.lower_periodic, {"schedule": PERIODIC}),
    "simulate_periodic": (pc.simulate_periodic, {"schedule": PERIODIC}),
    "Cluster": (pc.Cluster, {"device": "h100"}),
    "Cluster.of": (pc.Cluster.of, {}),
    "UserPass": (pc.UserPass, {"run": len, "name": "mine"}),
    "Partition.verify": (lambda problem_, n_stages: part().verify(problem() if isinstance(problem_, str) and problem_ == "own" else problem_, n_stages),
        {"problem_": "own", "n_stages": 2}),
    "Schedule by hand": (lambda n_stages, n_microbatches, placement, rows: pc.simulate(
        pc.Schedule(n_stages, n_microbatches, placement, rows)),
        {"n_stages": 2, "n_microbatches": 4, "placement": (0, 1), "rows": SCHEDULE.rows}),
    "Schedule.from_rows": (pc.Schedule.from_rows, {"rows": [["0F0"]]}),
    "Schedule.load": (pc.Schedule.load, {}),
    "Schedule.save": (SCHEDULE.save, {}),
    "Program.save": (lower(SCHEDULE).save, {}),
    "Problem.load": (pc.Problem.load, {}),
    "Problem.save": (lambda path: problem().save(path), {}),
    "Problem.from_json": (pc.Problem.from_json, {"text": "{}"}),
    "Plan.from_json": (pc.Plan.from_json, {"text": "{}"}),
    "PeriodicSchedule.from_json": (pc.PeriodicSchedule.from_json, {}),
    "Plan.load": (pc.Plan.load, {}),
    "Plan.save": (lambda path: pipe().plan.save(path), {}),
    "Schedule.from_csv": (pc.Schedule.from_csv, {"text": SCHEDULE.to_csv()}),
    "Schedule.from_rows by name": (lambda name: pc.simulate(pc.Schedule.from_rows([["0F0", "0B0"]], name)), {}),
    "Schedule in parts": (lambda name, overlaps: pc.verify(replace(SCHEDULE, name=name, overlaps=overlaps)), {"name": "", "overlaps": frozenset()}),
    "Action": (lambda stage, kind, microbatch: pc.verify(replace(SCHEDULE, rows=((Action(stage, kind, microbatch),), SCHEDULE.rows[1]))),
        {"stage": 0, "kind": Kind.FORWARD, "microbatch": 0}),
    "PeriodicSchedule in parts": (lambda **parts: pc.verify(replace(PERIODIC, **parts)), in_parts(PERIODIC)),
    "PeriodicSchedule.from_csv": (pc.PeriodicSchedule.from_csv, {"text": PERIODIC.to_csv()}),
    "PeriodicSchedule.repeated": (PERIODIC.repeated, {}),
    "PeriodicSchedule.unrolled": (PERIODIC.unrolled, {}),
    "PeriodicProgram in parts": (lambda **parts: pc.verify(replace(PERIODIC_PROGRAM, **parts)), in_parts(PERIODIC_PROGRAM)),
    "PeriodicProgram.from_text": (pc.PeriodicProgram.from_text, {"text": str(PERIODIC_PROGRAM)}),
    "PeriodicProgram.repeated": (PERIODIC_PROGRAM.repeated, {}),
    "PeriodicProgram.unrolled": (PERIODIC_PROGRAM.unrolled, {}),
    "PeriodicProgram.save": (PERIODIC_PROGRAM.save, {}),
    "Program in parts": (lambda **parts: pc.verify(replace(PROGRAM, **parts)), in_parts(PROGRAM)),
    "Problem in parts": (lambda **parts: pc.partition(replace(problem(), **parts), 2), dict.fromkeys(pc.Problem.__dataclass_fields__, KEEP)),
    "Plan in parts": (lambda **parts: compiled(plan=replace(pipe().plan, **parts)), dict.fromkeys(pc.Plan.__dataclass_fields__, KEEP)),
    "PipelineOrder.save": (ORDER.save, {}),
    "partitions": (pc.partitions, {}),
    "Microbatch": (lambda x, target: pipe().step(microbatches=[pc.Microbatch(x, target=target)]), {"x": X, "target": TARGET}),
    "draw": (lambda path: pipe().draw(path), {}),
    "clip_grad_norm_": (lambda max_norm, norm_type: pipe().clip_grad_norm_(max_norm, norm_type), {"max_norm": 1.0, "norm_type": 2.0}),
    "optimizer_state_dict": (lambda optimizer: pipe().optimizer_state_dict(optimizer), {}),
    "load_optimizer_state_dict": (lambda optimizer_, state: pipe().load_optimizer_state_dict(
        optimizer() if optimizer_ is KEEP else optimizer_, pipe().optimizer_state_dict(optimizer()) if state is KEEP else state),
        {"optimizer_": KEEP, "state": KEEP}),
    "sum_over_copies": (lambda values: pipe().sum_over_copies(values), {}),
    "explain batch_dims": (lambda batch_dims: pc.explain(net(), X, batch_dims=batch_dims), {}),
}  # fmt: skip
CASES = [
    (name, parameter) for name, (function, others) in FUNCTIONS.items() for parameter in parameters(function) or others
]
KEYWORDS = parameters(pc.compile)
SLOW = ("Plan in parts", "plan_for", "reschedule")
"""Functions that record or compile a model for every value that they take."""


@pytest.fixture(autouse=True)
def with_the_catalogue_as_before() -> Iterator[None]:
    before = dict(CATALOGUE)
    yield
    CATALOGUE.clear()
    CATALOGUE.update(before)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def values(request: pytest.FixtureRequest) -> list[Any]:
    """Return all values with `--full`; without, each case has every third, from another one on."""
    if request.config.getoption("--full"):
        return VALUES
    return VALUES[crc32(request.node.name.encode()) % 3 :: 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameter"), [case for case in CASES if case[0] not in SLOW])
def test_every_argument_takes_or_refuses_every_value(name: str, parameter: str, values: list[Any]) -> None:
    run(name, parameter, values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "parameter"), [case for case in CASES if case[0] in SLOW])
def test_every_argument_of_slow_functions(name: str, parameter: str, values: list[Any]) -> None:
    run(name, parameter, values)


def run(name: str, parameter: str, values: list[Any]) -> None:
    function, others = FUNCTIONS[name]
    given = {
        key: value
        for key, value in others.items()
        if value is not KEEP or "parts" not in str(inspect.signature(function))
    }
    assert not failures(lambda value: function(**{**given, parameter: value}), values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_every_keyword_of_compile_takes_or_refuses_every_value(keyword: str, values: list[Any]) -> None:
    assert not failures(lambda value: compiled(**{keyword: value}), values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compiled(n_stages=10**9), "n_stages=1000000000 is more than 10,000"),
        (lambda: compiled(n_microbatches=10**9), "n_microbatches=1000000000 is more than 1,000,000"),
        (lambda: pc.build_schedule("1f1b", 10**5, 10**5), "at most 50,000,000 cells"),
        (lambda: compiled(schedule=len), "schedule=len failed for"),
        (lambda: compiled(costs=lambda graph, inputs: None), "the function returned a NoneType"),
        (lambda: pipe().step(X, target=TARGET, scaler=True), "scaler=True is not a GradScaler"),
        (lambda: pipe().step(microbatches=[()]), "a batch is an empty sequence"),
        (lambda: pipe().evaluate(3), "evaluate takes batches, not an int"),
        (lambda: pipe().evaluate([(X, TARGET)], metric=3), "metric=3 is not a function"),
        (lambda: pipe().dump(None), "directory=None is not a path"),
        (lambda: compiled(plan=replace(pipe().plan, devices=None)), "plan=: the plan has parts of other types"),
        (lambda: pc.Plan.load(1.5), "path=1.5 is not a path"),
        (lambda: pc.Schedule.from_csv(b"0F0"), "a bytes is not text with rows"),
        (lambda: pc.partition(None, 2), r"a NoneType is not a Problem\n  try    pc\.partition\("),
        (lambda: pc.partition(problem(), 10**400), "expected at most 10,000"),
        (lambda: pc.simulate(SCHEDULE, forward=10**400), "forward=10.* is not a finite number"),
        (lambda: pc.simulate(SCHEDULE, engines=np.array([1.0, 2.0])), "engines=.* is not known"),
        (lambda: pc.build_schedule("gpipe", 2, 4, n_devices=10**400), "devices"),
        (lambda: pc.Cluster(device="h100", memory=10**400), "memory=10.* is not a finite number above 0"),
        (lambda: pc.Cluster.of(None), "None is not the name of a cluster"),
        (lambda: pc.lower_periodic(PERIODIC, 0), "routes=0 is not a sequence of routes"),
        (lambda: pc.lower_periodic(PERIODIC, ties="x"), "ties='x' is not a sequence of ties"),
        (lambda: pc.lower_periodic(PERIODIC, checkpoint=None), "checkpoint=None is not known"),
        (lambda: pc.lower_periodic(PERIODIC, receive_ahead=10**12), "receive_ahead=1000000000000 is more than 1,000"),
        (lambda: pc.unroll(pc.lower_periodic(PERIODIC), 10**12), "1000000000000 repetitions are too many to unroll"),
        (lambda: pc.forecast(SCHEDULE, jitter=0.1, draws=10**12), "draws=1000000000000 is more than 100,000"),
        (lambda: pc.read_schedule("deepspeed:TrainSchedule", n_microbatches=10**12), "at most 50,000,000 cells"),
        (lambda: pc.read_schedule(f"deepspeed:TrainSchedule;ranks=1{'0' * 400}"), "ranks=.* is not a whole number"),
        (lambda: pc.save_chakra(lower(SCHEDULE), ""), "path='.' has no name for files|path='' has no name for files"),
        (lambda: pc.UserPass(len, "mine", before=[]), "the place .* is not known"),
        (lambda: pc.Schedule.from_rows(None), "rows=None are not rows of actions"),
        (lambda: pc.Schedule.from_rows("0F0"), "rows='0F0' are not rows of actions"),
        (lambda: pc.Schedule.load(None), "path=None is not a path"),
        (lambda: pc.Problem.load("a\0b"), "is not a path"),
        (lambda: pc.Problem.from_json(None), "a NoneType is not JSON text"),
        (lambda: pc.Plan.from_json(None), "a NoneType is not JSON text"),
        (lambda: part().verify("x", 2), "a str is not a Problem"),
        (lambda: part().verify(problem(), "2"), "n_stages='2' is not a whole number"),
        (lambda: pc.PeriodicSchedule.from_json("[" * 100_000), "the text is not a periodic schedule"),
        (lambda: compiled(schedule=pc.Schedule(2, 4, (0, 1), ((1,), (2,)))), "row 0 of rows has 1, expected an Action"),
        (lambda: compiled(schedule=pc.Schedule(2, 4, None, SCHEDULE.rows)), "placement is None, expected a tuple"),
        (lambda: pc.PeriodicSchedule.from_json(PERIODIC.to_json().replace('"n_stages": 2', '"n_stages": 999999999')).unrolled(10**9),
         "repetitions are too many"),
    ],
)  # fmt: skip
def test_what_a_user_reads(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(pc.PipecompileError, match=message):
        call()

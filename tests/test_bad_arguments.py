"""Any value for any argument of a public function is taken, or refused by an error of ours: never a bare exception, never a long wait."""

from __future__ import annotations

import inspect
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc
from pipecompile.passes import lower
from pipecompile.schedules import CATALOGUE
from pipecompile.simulation.costs import CostOptions

Call = Callable[..., Any]

SCHEDULE = pc.build_schedule("1f1b", 2, 4)
PERIODIC = pc.build_periodic("1f1b", 2, 16)
X, TARGET = torch.randn(8, 4), torch.randn(8, 4)


class Odd:
    """An object that is nothing in particular."""


VALUES = [
    None, True, -1, 0, 3, 1.5, math.nan, math.inf, 10**9, -(10**30), 10**400, 10**5000, [10**5000], "", "a\0b", np.array(["x", "y"]), "nonsense", "1F1B", "16GiB", "auto", b"x", Odd(), Odd, [],
    [None], ["x"], [0, 2], {}, {"x": 1}, {"x": None}, {0: 0}, ({},), len, torch.zeros(2), torch.zeros(()), nn.Linear, nn.Linear(2, 2),
    torch.float32, torch.device("cpu"), range(2), {1, 2}, 1j,
]  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def compiled(model: Any = None, n_stages: Any = 2, **options: Any) -> pc.Pipeline:
    defaults: dict[str, Any] = {"example_args": (X,), "cost": "analytic", "loss_fn": mse_loss}
    return pc.compile(net() if model is None else model, n_stages, **{**defaults, **options})


@cache
def pipe() -> pc.Pipeline:
    return compiled(devices=["cpu"] * 2)


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
    has_costs = any(one.kind is one.VAR_KEYWORD and one.name == "costs" for one in given)
    return [*names, *(CostOptions.__annotations__ if has_costs else ())]


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
    "reschedule": (lambda schedule, count: compiled().reschedule(schedule, count), {"schedule": "gpipe", "count": 2}),
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
}  # fmt: skip
CASES = [(name, parameter) for name, (function, _) in FUNCTIONS.items() for parameter in parameters(function)]
KEYWORDS = parameters(pc.compile)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(call: Callable[[], Any]) -> None:
    """Run a call that may raise an error of ours, and no other."""
    with limited(60), suppress(pc.PipecompileError):
        call()


@pytest.fixture(autouse=True)
def with_the_catalogue_as_before() -> Iterator[None]:
    before = dict(CATALOGUE)
    yield
    CATALOGUE.clear()
    CATALOGUE.update(before)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


LENIENT = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.filterwarnings("ignore")
@settings(LENIENT, max_examples=250)
@given(case=st.sampled_from(CASES), value=st.sampled_from(VALUES))
def test_public_functions(case: tuple[str, str], value: Any) -> None:
    function, others = FUNCTIONS[case[0]]
    if isinstance(value, int) and case[0] in ("dump", "report", "Plan.save"):
        return  # the number of an open file
    check(lambda: function(**{**others, case[1]: value}))


@pytest.mark.filterwarnings("ignore")
@settings(LENIENT, max_examples=150)
@given(keyword=st.sampled_from(KEYWORDS), value=st.sampled_from(VALUES))
def test_keywords_of_compile(keyword: str, value: Any) -> None:
    check(lambda: compiled(**{keyword: value}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compiled(n_stages=10**9), "n_stages=1000000000 is more than 10,000"),
        (lambda: compiled(n_microbatches=10**9), "n_microbatches=1000000000 is more than 1,000,000"),
        (lambda: pc.build_schedule("1f1b", 10**5, 10**5), "at most 50,000,000 cells"),
        (lambda: compiled(schedule=len), "schedule=len failed for"),
        (lambda: compiled(costs=lambda graph, inputs: None), "the function returned a NoneType"),
        (lambda: pipe().step(X, target=TARGET, scaler=True), "scaler=True is no GradScaler"),
        (lambda: pipe().step(microbatches=[()]), "a batch is an empty sequence"),
        (lambda: pipe().evaluate(3), "evaluate takes batches, not a int"),
        (lambda: pipe().evaluate([(X, TARGET)], metric=3), "metric=3 is no function"),
        (lambda: pipe().dump(None), "directory=None is no path"),
        (lambda: pc.Plan.load(1.5), "path=1.5 is no path"),
        (lambda: pc.Schedule.from_csv(b"0F0"), "a bytes is no text of rows"),
        (lambda: pc.partition(None, 2), "a NoneType is no Problem"),
        (lambda: pc.partition(problem(), 10**400), "expected at most 10,000"),
        (lambda: pc.simulate(SCHEDULE, forward=10**400), "forward=10.* is not a finite number"),
        (lambda: pc.simulate(SCHEDULE, engines=np.array([1.0, 2.0])), "engines=.* is not known"),
        (lambda: pc.build_schedule("gpipe", 2, 4, n_devices=10**400), "devices"),
        (lambda: pc.Cluster(device="h100", memory=10**400), "memory=10.* is not a finite number above 0"),
        (lambda: pc.Cluster.of(None), "None is not the name of a cluster"),
        (lambda: pc.lower_periodic(PERIODIC, 0), "routes=0 is not a sequence of routes"),
        (lambda: pc.lower_periodic(PERIODIC, ties="x"), "ties='x' is no sequence of ties"),
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
        (lambda: pc.Schedule.load(None), "path=None is no path"),
        (lambda: pc.Problem.load("a\0b"), "is no path"),
        (lambda: pc.Problem.from_json(None), "a NoneType is no text of JSON"),
        (lambda: pc.Plan.from_json(None), "a NoneType is no text of JSON"),
        (lambda: part().verify("x", 2), "a str is no Problem"),
        (lambda: part().verify(problem(), "2"), "n_stages='2' is not a whole number"),
        (lambda: pc.PeriodicSchedule.from_json("[" * 100_000), "the text is no periodic schedule"),
        (lambda: compiled(schedule=pc.Schedule(2, 4, (0, 1), ((1,), (2,)))), "row 0 of rows has 1, expected an Action"),
        (lambda: compiled(schedule=pc.Schedule(2, 4, None, SCHEDULE.rows)), "placement is None, expected a tuple"),
        (lambda: pc.PeriodicSchedule.from_json(PERIODIC.to_json().replace('"n_stages": 2', '"n_stages": 999999999')).unrolled(10**9),
         "repetitions are too many"),
    ],
)  # fmt: skip
def test_what_a_user_reads(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(pc.PipecompileError, match=message):
        call()

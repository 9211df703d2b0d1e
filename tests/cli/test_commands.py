"""The five commands from the words typed to stdout, stderr and the exit code."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest
from torch import nn
from typer.main import get_command

import pipecompile as pc
from pipecompile import compiling
from pipecompile.cli import app
from pipecompile.errors import (
    InfeasibleError,
    InputError,
    RunError,
    ScheduleError,
    TraceError,
    VerifyError,
)
from pipecompile.passes import lower

SMALL = ("mymodels:small", "--input", "12x8")

ONE_F_ONE_B = """\
       0   1   2   3   4   5   6   7   8
dev 0  0F0 0F1 .   .   0B0---- .   0B1----
dev 1  .   1F0 1B0---- 1F1 1B1---- .   .
"""


@pytest.mark.usefixtures("models")
def test_plan_passes_every_option_on(cli, compiler):
    inputs = ["--input", "12x8", "--input", "12x4:int64"]
    counts = ["--stages", "2", "--microbatches", "3", "--memory-limit", "2GiB", "--devices", "cpu,cpu"]
    names = ["--schedule", "gpipe", "--partitioner", "ilp", "--cost", "profile", "--tied", "apart"]
    machine = ["--optimizer", "adam", "--speeds", "1,0.5", "--bandwidth", "16GB", "--checkpoint", "auto"]
    steered = ["--split-before", "1", "--keep-together", "0,1", "--keep-together", "Linear", "--pin", "2=1"]
    solved = ["--balance", "2,1", "--time-limit", "2.5", "--gap", "0.01"]
    trained = [
        "--offload",
        "--restored",
        "2",
        "--gradient-sums",
        "device",
        "--dispatch",
        "inline",
        "--batch-norm",
        "each",
        "--across-batch",
        "exact",
        "--compile-stages",
        "eager",
        "--cuda-graphs",
        "--no-progress",
    ]
    words = [*inputs, *counts, *names, *machine, *steered, *solved, *trained]
    assert cli("plan", "mymodels:small", *words).code == 0
    (call,) = compiler.calls
    first, second = call.pop("example_args")
    assert (first.shape, str(first.dtype), second.shape, str(second.dtype)) == (
        (12, 8),
        "torch.float32",
        (12, 4),
        "torch.int64",
    )
    assert type(call.pop("model")).__name__ == "Sequential"
    assert call.pop("loss_fn")(first).ndim == 0
    assert call == {
        "n_stages": 2, "n_microbatches": 3, "schedule": "gpipe", "partitioner": "ilp", "cost": "profile",
        "memory_limit": 2 * 2**30, "devices": ["cpu", "cpu"], "tied": "apart", "optimizer": "adam",
        "speeds": [1.0, 0.5], "bandwidth": 16_000_000_000, "checkpoint": "auto", "split_before": ["1"],
        "keep_together": [["0", "1"], nn.Linear], "pin": {"2": 1}, "balance": [2, 1], "time_limit": 2.5, "gap": 0.01, "plan": None,
        "restored": 2, "offload": True, "dispatch": "inline", "gradient_sums": "device", "batch_norm": "each", "across_batch": "exact", "compile_stages": "eager", "cuda_graphs": True, "progress": False,
    }  # fmt: skip


@pytest.mark.usefixtures("models")
def test_what_is_not_typed_is_as_compile_has_it(cli, compiler):
    cli("plan", *SMALL)
    (call,) = compiler.calls
    usual = {name: p.default for name, p in inspect.signature(compiling.compile).parameters.items()}
    given = call.keys() - {"model", "n_stages", "example_args", "loss_fn"}
    assert {name: call[name] or None for name in given} == {name: usual[name] or None for name in given}


@pytest.mark.parametrize("command", ["plan", "simulate", "run"])
def test_every_argument_of_compile_that_can_be_typed_is_an_option(command):
    """What cannot: functions, tensors, and what is about those."""
    options = {param.name for param in get_command(app).commands[command].params}
    arguments = set(inspect.signature(compiling.compile).parameters)
    not_typed = {
        "example_args",
        "example_kwargs",
        "batch_dims",
        "split",
        "loss_fn",
        "loss_reduction",
        "has_aux",
        "lost_copies",
        "mesh",
        "reshard_after_forward",
        "passes",
        "costs",
        "cache_size",
        "check",
        "init",
    }
    spelled = {"n_stages": "stages", "n_microbatches": "microbatches"}
    assert {spelled.get(name, name) for name in arguments - not_typed} <= options


@pytest.mark.usefixtures("models")
def test_plan_prints_the_table_and_writes_the_files(cli, models):
    outcome = cli("plan", *SMALL, "--out", "made")
    assert outcome.code == 0
    assert "bottleneck 3.00 ms, optimal · lower bound 3.00 ms · gap 0.0%" in outcome.out
    assert "wrote made/plan.json made/schedule.csv" in outcome.out
    assert sorted(os.listdir(models / "made")) == ["plan.json", "schedule.csv"]
    assert "\x1b" not in outcome.out


@pytest.mark.usefixtures("models")
def test_plan_of_a_cluster_shows_its_layouts(cli):
    outcome = cli("plan", *SMALL, "--cluster", "4xh100", "--optimizer", "sgd", "--no-progress")
    assert outcome.code == 0
    assert "12 samples a step on 1 x 4 h100" in outcome.out
    assert "pc.compile(model, " in outcome.out
    rows = cli("plan", *SMALL, "--cluster", "4xh100", "--json").json["layouts"]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert rows[0]["optimizer"] == "adamw"


@pytest.mark.usefixtures("models")
def test_plan_of_a_cluster_refuses_options_of_a_single_layout(cli):
    outcome = cli("plan", *SMALL, "--cluster", "4xh100", "--stages", "2", "--out", "made")
    assert outcome.code == 2
    assert "--stages, --out cannot be used with --cluster" in outcome.err
    assert cli("plan", *SMALL, "--cluster", "4xh900").code == 2


@pytest.mark.usefixtures("models")
def test_plan_as_json(cli):
    data = cli("plan", *SMALL, "--json").json
    assert data["plan"]["n_stages"] == 4
    assert data["plan"]["stages"][3]["parameters"] == 72
    assert data["gap"] == 0
    assert 0 < data["bubble"] < 1
    assert data["files"] == []


@pytest.mark.usefixtures("models")
def test_what_the_model_prints_goes_to_stderr(cli):
    outcome = cli("plan", *SMALL, "--json")
    assert "talking" in outcome.err
    assert "talking" not in outcome.out


@pytest.mark.usefixtures("models")
def test_simulate_prints_seconds_devices_and_the_unit_grid(cli):
    outcome = cli("simulate", *SMALL, "--stages", "2", "--microbatches", "2")
    assert "1f1b, 2 stages on 2 devices, 2 micro-batches: makespan 9.20 ms, bubble 34.8%" in outcome.out
    assert ONE_F_ONE_B in outcome.out
    assert "1 · cpu" in outcome.out
    data = cli("simulate", *SMALL, "--stages", "2", "--microbatches", "2", "--json").json
    assert data["makespan"] == pytest.approx(9.2e-3)
    assert data["unit_time"]["makespan"] == 9
    assert data["peak_in_flight"] == [2, 1]
    assert data["csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.usefixtures("models")
def test_run_trains_and_agrees_with_eager(cli):
    data = cli("run", *SMALL, "--steps", "4", "--microbatches", "5", "--json").json
    assert len(data["losses"]) == len(data["seconds"]) == len(data["eager_losses"]) == 4
    assert data["losses"][3] < data["losses"][0]
    assert data["loss_difference"] == 0
    assert data["gradient_difference"] == 0
    assert data["largest_gradient"] > 0
    assert data["random"] is False
    text = cli("run", *SMALL).out
    assert "largest difference to eager micro-batches: loss 0, gradient 0" in text
    assert "dropout" not in text


@pytest.mark.usefixtures("models")
def test_run_tells_wrong_gradients(cli, compiler):
    compiler.factor = 1.5
    data = cli("run", *SMALL, "--steps", "1", "--json").json
    assert data["loss_difference"] == 0
    assert data["gradient_difference"] == pytest.approx(data["largest_gradient"] / 2)


@pytest.mark.usefixtures("models")
def test_run_without_comparison(cli):
    data = cli("run", *SMALL, "--no-compare", "--json").json
    assert len(data["losses"]) == 3
    assert data["eager_losses"] == []
    assert "eager" not in cli("run", *SMALL, "--no-compare").out


@pytest.mark.usefixtures("models")
def test_run_says_when_the_model_draws_random_numbers(cli):
    assert "draws random numbers" in cli("run", "mymodels:with_dropout", "--input", "12x8").out


def test_schedule_needs_no_model(cli, compiler, tmp_path):
    outcome = cli("schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--out", tmp_path)
    assert outcome.code == 0
    assert "makespan 9, bubble 33.3%, span 9" in outcome.out
    assert ONE_F_ONE_B in outcome.out
    assert "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n" in outcome.out
    assert sorted(os.listdir(tmp_path)) == ["report.html", "schedule.csv", "timeline.json", "timeline.svg"]
    data = cli("schedule", "gpipe", "--json").json
    assert (data["n_stages"], data["n_microbatches"], data["makespan"]) == (4, 8, 33)
    assert compiler.calls == []


def test_a_file_of_ones_own_is_drawn_or_what_is_wrong_with_it_said(cli, tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0I0,0W0,0I1,0W1\n")
    assert cli("schedule", tmp_path / "mine.csv").out.startswith(
        "mine, 1 stage on 1 device, 2 micro-batches: makespan 6,"
    )
    (tmp_path / "mine.csv").write_text("0F0,0F1,0W0,0I0,0I1\n")
    outcome = cli("schedule", tmp_path / "mine.csv")
    assert outcome.code != 0
    assert "0W0 runs before 0I0" in outcome.err
    assert "stage 0 runs I without W for micro-batch 1" in outcome.err
    assert "device 0 │ 0F0  0F1  0W0* 0I0* 0I1" in outcome.err


def test_devices_are_as_many_as_asked_for(cli):
    assert (
        cli("schedule", "interleaved", "--stages", "6", "--devices", "3", "--json").json["placement"] == [0, 1, 2] * 2
    )
    assert cli("schedule", "zbv", "--stages", "4", "--json").json["placement"] == [0, 1, 1, 0]


def test_a_schedule_is_searched_for_or_recomputes(cli):
    found = cli("schedule", "auto", "--stages", "2", "--microbatches", "4", "--json").json
    built = cli("schedule", "1f1b", "--stages", "2", "--microbatches", "4", "--json").json
    assert found["makespan"] < built["makespan"]
    again = cli("schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--checkpoint", "1,0", "--json").json
    assert again["csv"] == "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n"


def test_an_unknown_schedule_is_a_usage_error_that_lists_the_known(cli):
    outcome = cli("schedule", "zigzag")
    assert outcome.code == 2
    assert "zigzag" in outcome.err
    assert "'1f1b'" in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("bad input"), 2),
        (ScheduleError("bad schedule"), 2),
        (TraceError("cannot record", where="model.py:3"), 3),
        (InfeasibleError("nothing fits"), 4),
        (VerifyError("program", ["a fault"]), 1),
        (VerifyError("schedule 'mine'", ["a fault"]), 1),
        (RunError("stage failed", stage=1, microbatch=0), 1),
    ],
)
@pytest.mark.usefixtures("models")
def test_errors_have_an_exit_code_and_no_traceback(cli, compiler, error, code):
    compiler.error = error
    outcome = cli("plan", *SMALL)
    assert outcome.code == code
    assert f"{type(error).__name__}: {error}" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("name", ["mine.csv", "mine.txt"])
@pytest.mark.usefixtures("models")
def test_a_fault_in_the_file_of_a_schedule_is_exit_code_5(cli, compiler, tmp_path, name):
    (tmp_path / "mine.csv").write_text(pc.build_schedule("1f1b", 2, 4).to_csv())
    (tmp_path / "mine.txt").write_text(str(lower(pc.build_schedule("1f1b", 2, 4))))
    compiler.error = VerifyError("what it holds", ["a fault"])
    assert cli("plan", *SMALL, "--schedule", str(tmp_path / name)).code == 5


@pytest.mark.usefixtures("models")
def test_an_error_as_json_is_one_object_too(cli, compiler):
    compiler.error = InputError("cannot take it", where="model.py:3")
    outcome = cli("plan", *SMALL, "--json")
    assert outcome.code == 2
    assert outcome.json == {"error": "InputError", "message": "cannot take it\n  where  model.py:3"}


@pytest.mark.usefixtures("models")
def test_a_bug_of_the_users_keeps_its_traceback(cli, compiler):
    compiler.error = ZeroDivisionError("in forward")
    with pytest.raises(ZeroDivisionError, match="in forward"):
        cli("plan", *SMALL)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan"], "MODEL"),
        (["plan", "mymodels:small"], "--input"),
        (["plan", *SMALL, "--stages", "two"], "'--stages'"),
        (["plan", *SMALL, "--memory-limit", "lots"], "lots"),
        (["plan", *SMALL, "--microbatches", "many"], "--microbatches 'many'"),
        (["plan", "mymodels:small", "--input", "3xx4"], "3xx4"),
        (["run", *SMALL, "--steps", "0"], "--steps"),
        (["run", *SMALL, "--optimizer", "lion"], "cannot train with 'lion'"),
        (["run", *SMALL, "--optimizer", "adan"], "--optimizer adan is not known"),
        (["plan", *SMALL, "--plan", "none.json"], "none.json"),
        (["plan", *SMALL, "--pin", "fc"], "--pin 'fc'"),
        (["schedule", "1f1b", "--checkpoint", "auto"], "--checkpoint auto needs a model"),
        (["schedule", "1f1b", "--checkpoint", "sometimes"], "--checkpoint sometimes is not known"),
        (["draw", *SMALL], "draw"),
    ],
)
@pytest.mark.usefixtures("models")
def test_what_was_typed_wrong_is_named(cli, words, told):
    outcome = cli(*words)
    assert outcome.code == 2
    assert told in outcome.err


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["run", "--help"]])
def test_help_imports_neither_torch_nor_matplotlib(words):
    code = (
        "import sys\n"
        "import pipecompile.cli\n"
        f"try: pipecompile.cli.app({words!r})\n"
        "finally: print([name for name in ('torch', 'matplotlib', 'pulp') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == "[]\n"
    assert "Usage" in done.stdout


def test_the_version_is_that_of_the_package(cli):
    from importlib.metadata import version

    import pipecompile

    outcome = cli("--version")
    assert (outcome.code, outcome.out) == (0, f"pipecompile {pipecompile.__version__}\n")
    assert version("pipecompile") == pipecompile.__version__


def test_python_dash_m_runs_the_same_program():
    words = [sys.executable, "-m", "pipecompile", "plan", "nothing", "--input", "1", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "InputError"


CHOOSY = """
from torch import nn

class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def inside():
    return nn.Sequential(nn.Linear(8, 8), Branch())
"""


def test_check_explains_a_model(cli, tmp_path, monkeypatch):
    (tmp_path / "choosy_models.py").write_text(CHOOSY)
    monkeypatch.syspath_prepend(tmp_path)
    good = cli("check", "choosy_models:inside", "--input", "4x8")
    assert good.code == 0
    assert "1: PC101" in good.out
    bad = cli("check", "choosy_models:Branch", "--input", "4x8", "--json", "--eval")
    assert bad.code == 3
    assert not bad.json["traced"]
    (failure,) = bad.json["failures"]
    assert (failure["code"], failure["line"]) == ("PC101", 6)
    assert cli("check", "choosy_models:inside", "--input", "0x8").code == 2

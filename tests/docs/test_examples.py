"""The examples run as scripts, agree with eager PyTorch, and write what they name."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

import pytest
import torch

from tests.support.small_models import with_small_models
from tests.support.torchrun import torchrun

ROOT = Path(__file__).parents[2]
FILES = {
    "graph.dot",
    "graph.py",
    "passes.txt",
    "plan.json",
    "program.txt",
    "report.html",
    "schedule.csv",
    "timeline.json",
    "timeline.svg",
}


class Run(Protocol):
    def __call__(self, name: str, *options: str) -> str: ...


STEP = re.compile(r"^ *(\d+) +(\S+) +(\S+) +(\S+)$", re.MULTILINE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config) -> Run:
    """Return a function that runs a script of examples/ in this process, which has torch already, and returns what it prints.

    Without `--full`, models of torchvision have fewer blocks.
    """
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    if not pytestconfig.getoption("--full"):
        with_small_models(monkeypatch)

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        n_threads = torch.get_num_threads()
        with torch.random.fork_rng():
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        torch.set_num_threads(n_threads)
        return capsys.readouterr().out

    return run


def print_of_process(name: str, *options: str) -> str:
    """Return what a script of examples/ prints in a process of its own."""
    script = [sys.executable, str(ROOT / "examples" / name)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*script, *options], env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["quickstart.py", "unet.py", "every_layer_skips.py"])
@pytest.mark.parametrize("steps", ["0", "-1", "two"])
def test_numbers_of_which_an_example_has_no_step_are_refused(
    name: str, steps: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--steps", steps)
    assert ended.value.code == 2
    assert f"argument --steps: {steps} is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart.py", "unet.py"])
def test_an_example_equals_eager_and_writes_what_it_names(name: str, tmp_path: Path, run: Run) -> None:
    """In two small steps on CPU. One test, since two workers would both run the example for the tests that they share."""
    printed = run(name, "--out", str(tmp_path), "--steps", "2", "--image-size", "32", "--batch", "17")
    check_that_steps_equal_eager(printed)
    check_table_and_bubbles(printed)
    check_files(printed, tmp_path)
    check_skips(printed)


def check_that_steps_equal_eager(printed: str) -> None:
    steps = [(int(step), *map(float, rest)) for step, *rest in STEP.findall(printed)]
    assert [step for step, *_ in steps] == [0, 1]
    for _, loss, eager_loss, difference in steps:
        assert loss == eager_loss
        assert difference <= 1e-6


def check_table_and_bubbles(printed: str) -> None:
    assert re.search(r"^4 stages on 4 devices", printed, re.MULTILINE)
    bubbles = re.search(r"bubble: ([\d.]+)% simulated, ([\d.]+)% measured", printed)
    assert bubbles is not None
    assert all(0 < float(bubble) < 100 for bubble in bubbles.groups())


def check_files(printed: str, out: Path) -> None:
    named = {Path(line.strip()) for line in printed.partition("wrote:\n")[2].splitlines()}
    assert {path.name for path in named} >= FILES
    assert all(path.parent == out and path.stat().st_size > 0 for path in named)


def check_skips(text: str) -> None:
    shown = re.findall(r"stage (\d) to stage (\d)", text)
    if "skips, each copied once" in text:
        assert shown
    assert all(int(target) > int(source) + 1 for source, target in shown)


def print_of_ranks(*runs: tuple[object, ...]) -> list[str]:
    """Return what each run prints, one after the other on the same ranks: a number of ranks, a script of examples/, its options."""
    words = json.dumps([[run[0], *map(str, run[1:])] for run in runs])
    ranks = max(run[0] for run in runs)
    printed = torchrun(ranks, ROOT / "tests" / "support" / "examples_on_ranks.py", words)
    return re.split(r"^run \d+\n", printed, flags=re.MULTILINE)[1:]


def test_the_examples_on_ranks_train_as_one_process_does_and_go_on_from_checkpoints(tmp_path: Path) -> None:
    """Training that goes on with one rank where two were prints the steps that were left.

    Copies have parts of 42 and 41 samples, and of 2 and 2 in the last batch; validation is over 84, 83, 83 and 4 samples.
    """
    script, copies = "train_distributed.py", "train_copies.py"
    options = ("--out", tmp_path / "steps", "--image-size", 32, "--batch", 9, "--every", 2, "--steps")
    first, second, alone, two_copies, two_stages = print_of_ranks(
        (2, script, *options, 3), (1, script, *options, 4), (1, copies, "--epochs", 2),
        (2, copies, "--epochs", 2, "--copies", 2, "--out", tmp_path / "copies"), (2, copies, "--epochs", 2),
    )  # fmt: skip
    losses = [[float(line.split()[1]) for line in printed.splitlines()] for printed in (first, second)]
    assert [len(steps) for steps in losses] == [3, 1]
    assert losses[1][0] < losses[0][2] < losses[0][0]
    assert {path.name: len([*path.glob("*.distcp")]) for path in (tmp_path / "steps").iterdir()} == {
        "00000003": 2, "00000004": 1, "last_good": 0,
    }  # fmt: skip
    assert len(alone.splitlines()) == 2
    assert "right" in alone
    assert two_copies == alone
    assert two_stages == alone
    state = torch.load(tmp_path / "copies" / "best.pt", weights_only=True)
    assert [*state] == [f"{layer}.{name}" for layer in (0, 2, 3, 5) for name in ("weight", "bias")]


def test_copies_train_in_mixed_precision(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("with --full")
    (printed,) = print_of_ranks((2, "train_copies.py", "--epochs", 2, "--copies", 2, "--amp"))
    first, second = (float(line.split()[3]) for line in printed.splitlines())
    assert second < first


@dataclass
class CopyAtSecondEpoch:
    """Standard output that copies a folder when a script prints its first line of the second epoch."""

    stream: TextIO
    folder: Path
    copy: Path

    def write(self, text: str) -> int:
        if text.startswith("epoch 1 ") and not self.copy.exists():
            shutil.copytree(self.folder, self.copy)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "batches", "least", "resume_in_process"),
    [
        ("train_images.py", 16, 90, False),
        ("finetune_language_model.py", 12, 95, True),
        ("segment_images.py", 16, 95, True),
        ("train_in_lightning.py", 16, 90, True),
    ],
)
def test_a_resumed_training_has_the_losses_of_one_that_was_not_interrupted_and_learns(
    name: str,
    batches: int,
    least: float,
    resume_in_process: bool,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    """What goes on has the checkpoint that was there when the second epoch began, as if that had been interrupted."""

    def options(out: str) -> list[str]:
        in_half = "language" in name or (pytestconfig.getoption("--full") and "lightning" not in name)
        amp = ["--amp"] if in_half else []  # convolutions in bfloat16 take 25 times as long as in float32 on CPUs
        return [*amp, "--out", str(tmp_path / out), "--epochs", "2"]

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", CopyAtSecondEpoch(sys.stdout, tmp_path / "whole", tmp_path / "parts"))
        whole = run(name, *options("whole")).splitlines()
    second = next(number for number, line in enumerate(whole) if line.startswith("epoch 1 "))
    goes_on = run if resume_in_process else print_of_process
    assert goes_on(name, *options("parts")).splitlines() == whole[second:]
    assert len([line for line in whole if "batch" in line]) == 2 * batches
    right = [float(share) for share in re.findall(r"(?:right|overlap) (.*)%", "\n".join(whole))]
    assert right[0] < right[1]
    assert right[1] > least
    assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", ["densenet", "attention-residuals", "unet++", "hyper-connections"])
def test_values_and_gradients_of_every_layer_skips_cross_once_per_device(model: str, run: Run) -> None:
    """Printed are the pairs of a value and a device that reads it, and what is sent forth and back.

    tests/system/test_every_layer_skips.py trains attention residuals in every run.
    """
    printed = run("every_layer_skips.py", "--steps", "1", "--time-limit", "0.2", "--models", model)
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert [(name, schedule, stages) for name, schedule, stages, *_ in rows] == [
        (model, "1f1b", "4"), (model, "interleaved", "8"), (model, "zbv", "8"),
    ]  # fmt: skip
    for *_, crossings, values, gradients, loss, eager_loss, difference in rows:
        assert int(crossings) == int(values) == int(gradients) > 3
        assert loss == eager_loss
        assert float(difference) < 1e-6

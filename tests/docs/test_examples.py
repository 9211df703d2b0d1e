"""The examples run as scripts, agree with eager PyTorch, and write what they name."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
STEP = re.compile(r"^ *(\d+) +(\S+) +(\S+) +(\S+)$", re.MULTILINE)


@pytest.mark.parametrize("name", ["quickstart", "unet"])
def test_an_example_equals_eager_and_writes_what_it_names(name: str, tmp_path: Path) -> None:
    """In two small steps on CPU. One test, since two workers would both run the example for the tests that they share."""
    printed = print_of(name, tmp_path)
    check_that_steps_equal_eager(printed)
    check_table_and_bubbles(printed)
    check_files(printed, tmp_path)
    check_skips(printed)


def print_of(name: str, out: Path) -> str:
    script = ROOT / "examples" / f"{name}.py"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    options = ["--steps", "2", "--image-size", "32", "--batch", "17"]
    done = subprocess.run([sys.executable, str(script), "--out", str(out), *options], env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_training_on_two_ranks_and_on_from_there_on_one(tmp_path: Path) -> None:
    """The second run prints the steps that the first has not, and goes on with its losses."""
    script = [
        str(ROOT / "examples" / "train_distributed.py"),
        "--out",
        str(tmp_path),
        "--image-size",
        "32",
        "--batch",
        "9",
    ]
    losses = {}
    for ranks, steps in ((2, 3), (1, 4)):
        printed = torchrun(ranks, *script, "--steps", str(steps), "--every", "2", timeout=120)
        losses |= {int(line.split()[0]): (float(line.split()[1]), ranks) for line in printed.splitlines()}
    assert [ranks for _, ranks in losses.values()] == [2, 2, 2, 1]
    assert losses[3][0] < losses[2][0] < losses[0][0]
    assert {path.name: len([*path.glob("*.distcp")]) for path in tmp_path.iterdir()} == {
        "00000003": 2, "00000004": 1, "last_good": 0,
    }  # fmt: skip


def train_copies(ranks: int, *options: str) -> list[str]:
    """Return the lines that examples/train_copies.py prints on so many ranks."""
    return torchrun(ranks, ROOT / "examples" / "train_copies.py", "--epochs", "2", *options).splitlines()


@pytest.mark.timeout(1000)
def test_copies_and_stages_train_as_one_process_does(tmp_path: Path) -> None:
    """Parts of 42 and 41 samples, and of 2 and 2 in the last batch; validation over 84, 83, 83 and 4 samples."""
    lines = train_copies(1)
    assert len(lines) == 2
    assert "right" in lines[0]
    assert train_copies(2, "--copies", "2", "--out", str(tmp_path)) == lines
    assert train_copies(2) == lines
    state = torch.load(tmp_path / "best.pt", weights_only=True)
    assert [*state] == [f"{layer}.{name}" for layer in (0, 2, 3, 5) for name in ("weight", "bias")]


def test_copies_train_in_mixed_precision(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("with --full")
    first, second = (float(line.split()[3]) for line in train_copies(2, "--copies", "2", "--amp"))
    assert second < first


def resumed(name: str, options: list[str]) -> list[str]:
    """Return the lines that a script of examples/ prints in a process of its own."""
    script = [sys.executable, str(ROOT / "examples" / name)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*script, *options], env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "batches", "least"),
    [
        ("train_images.py", 16, 90),
        ("finetune_language_model.py", 12, 95),
        ("segment_images.py", 16, 95),
        ("train_in_lightning.py", 16, 90),
    ],
)
def test_a_resumed_training_has_the_losses_of_one_that_was_not_interrupted_and_learns(
    name: str,
    batches: int,
    least: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first two runs are in this process, which has torch already; the one that goes on is in a new process."""

    def trained(out: str, epochs: int) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *options(out, epochs)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    def options(out: str, epochs: int) -> list[str]:
        amp = [] if "lightning" in name else ["--amp"]  # its bfloat16 is slow on CPUs
        return [*amp, "--out", str(tmp_path / out), "--epochs", str(epochs)]

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    n_threads = torch.get_num_threads()
    with torch.random.fork_rng():
        whole, first = trained("whole", 2), trained("parts", 1)
    torch.set_num_threads(n_threads)
    assert first + resumed(name, options("parts", 2)) == whole
    assert len([line for line in whole if "batch" in line]) == 2 * batches
    right = [float(share) for share in re.findall(r"(?:right|overlap) (.*)%", "\n".join(whole))]
    assert right[0] < right[1]
    assert right[1] > least
    assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize("model", ["attention-residuals", "hyper-connections", "unet++", "densenet"])
def test_values_and_gradients_of_every_layer_skips_cross_once_per_device(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed are the pairs of a value and a device that reads it, and what is sent forth and back."""
    arguments = ["every_layer_skips.py", "--steps", "1", "--time-limit", "0.2", "--models", model]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    n_threads = torch.get_num_threads()
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / arguments[0]), run_name="__main__")
    torch.set_num_threads(n_threads)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(name, schedule, stages) for name, schedule, stages, *_ in rows] == [
        (model, "1f1b", "4"), (model, "interleaved", "8"), (model, "zbv", "8"),
    ]  # fmt: skip
    for *_, crossings, values, gradients, loss, eager_loss, difference in rows:
        assert int(crossings) == int(values) == int(gradients) > 3
        assert loss == eager_loss
        assert float(difference) < 1e-6

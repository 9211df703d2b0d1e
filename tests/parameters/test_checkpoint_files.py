from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import pipecompile as pc
from pipecompile.parameters.checkpoint_files import read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2), "b.weight": torch.full((2, 2), 7.0)}


def saved(path: Path, state: dict[str, object]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def as_safetensors(path: Path) -> Path:
    torch_of = pytest.importorskip("safetensors.torch")
    path.mkdir()
    torch_of.save_file({"a.weight": STATE["a.weight"]}, path / "one.safetensors")
    torch_of.save_file({name: STATE[name] for name in ("a.bias", "b.weight")}, path / "two.safetensors")
    return path


FORMS: dict[str, Callable[[Path], Path]] = {
    "by itself": lambda path: saved(path, dict(STATE)),
    "with an optimizer": lambda path: saved(
        path, {"model": dict(STATE), "optimizer": {"state": {"a.weight": {"step": 3}}}}
    ),
    "deep in a dict": lambda path: saved(path, {"app": {"net": dict(STATE)}, "step": 5}),
    "safetensors": as_safetensors,
}


@pytest.mark.parametrize("form", FORMS)
def test_only_what_is_wanted_is_read_in_place(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path / "out")
    weight, bias = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)), torch.zeros(2)
    read_checkpoint(path, [(["tied.weight", "a.weight"], weight), (["a.bias"], bias)])
    assert torch.equal(weight, STATE["a.weight"].double())
    assert torch.equal(bias, STATE["a.bias"])


@pytest.mark.parametrize("form", ["with an optimizer", "safetensors"])
def test_all_that_is_missing_or_of_another_shape_is_told(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path / "out")
    kept = torch.zeros(2, 2)
    wanted = [(["a.weight"], torch.zeros(3)), (["c.weight", "d.weight"], torch.zeros(3)), (["b.weight"], kept)]
    with pytest.raises(
        pc.InputError,
        match=r"a.weight has shape \[2, 3\] in the checkpoint and \[3\] in the model; c.weight is missing",
    ):
        read_checkpoint(path, wanted)
    assert not kept.any()


def test_two_models_in_one_checkpoint_are_told_apart(tmp_path: Path) -> None:
    averaged = {name: value + 1 for name, value in STATE.items()}
    both = saved(tmp_path / "both", {"ema": averaged, "model": dict(STATE)})
    bias = torch.zeros(2)
    read_checkpoint(both, [(["a.bias"], bias)])
    assert torch.equal(bias, STATE["a.bias"])
    twice = saved(tmp_path / "twice", {"ema": averaged, "student": dict(STATE)})
    with pytest.raises(pc.InputError, match=r"the names of the model under several prefixes\n.*ema\.\*, student\.\*"):
        read_checkpoint(twice, [(["a.bias"], bias)])


# -- the optimizer's state ---------------------------------------------------------------------------------------------

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.RMSprop, {"centered": True}),
     (torch.optim.Adafactor, {}), (torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True})],
)  # fmt: skip
def test_optimizers_and_schedulers_go_on_in_another_cut(
    optimizer: type[torch.optim.Optimizer], options: dict[str, object], tmp_path: Path
) -> None:
    """With a layer that is frozen; bit for bit."""
    x = torch.randn(8, 6)

    def started(
        n_stages: int,
    ) -> tuple[Callable[[], float], Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]:
        torch.manual_seed(n_stages)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        model[1].requires_grad_(requires_grad=False)
        pipe = pc.compile(model, n_stages, devices=["cpu"] * n_stages, example_args=(x,), cost="analytic", n_microbatches=2,
                          loss_fn=lambda y: y.square().mean(), dispatch="inline")  # fmt: skip
        made = optimizer(pipe.parameters(), **copy.deepcopy(options))
        scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)

        def step() -> float:
            made.zero_grad()
            loss = pipe.step(x)
            made.step()
            scheduler.step()
            return loss.item()

        def state() -> dict[str, Any]:
            held = pipe.optimizer_state_dict(made)
            assert held.keys() == get_optimizer_state_dict(model, made, options=FLAT).keys()
            return {"model": pipe.state_dict(), "optimizer": held, "scheduler": scheduler.state_dict()}

        def load(held: dict[str, Any]) -> None:
            pipe.load_state_dict(held["model"])
            pipe.load_optimizer_state_dict(made, held["optimizer"])
            scheduler.load_state_dict(held["scheduler"])

        return step, state, load

    step, state, _ = started(4)
    for _ in range(3):
        step()
    saved(tmp_path, state())
    expected = [step() for _ in range(3)]
    step, state, load = started(2)
    held = state()
    dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
    load(held)
    assert [step() for _ in range(3)] == expected


# -- the last one that is whole ----------------------------------------------------------------------------------------


def test_the_latest_is_the_last_that_is_whole(tmp_path: Path) -> None:
    assert pc.latest_checkpoint(tmp_path / "nowhere") is None
    assert pc.latest_checkpoint(tmp_path) is None
    for name in ("best", "step-9", "step-10", "8"):
        saved(tmp_path / name, dict(STATE))
    assert pc.latest_checkpoint(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-11" / "__0_0.distcp").write_bytes(b"half of it")
    assert pc.latest_checkpoint(str(tmp_path)) == tmp_path / "step-10"


@pytest.mark.parametrize("count", range(len(STATE) + 2))
def test_a_save_that_fails_after_any_write_harms_no_other(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many tensors, the last time while the metadata are written."""
    good, written = saved(tmp_path / "1", dict(STATE)), []
    plain, plain_rename = filesystem._write_item, filesystem.FileSystem.rename

    def failing(*args: object) -> object:
        written.append(1)
        if len(written) > count:
            raise OSError("no space left")
        return plain(*args)

    def renaming(*args: object) -> object:
        if count == len(STATE):
            raise OSError("no space left")
        return plain_rename(*args)

    monkeypatch.setattr(filesystem, "_write_item", failing)
    monkeypatch.setattr(filesystem.FileSystem, "rename", renaming)
    changed = {name: value + 1 for name, value in STATE.items()}
    if count <= len(STATE):
        with pytest.raises(dcp.CheckpointException, match="no space left"):
            saved(tmp_path / "2", changed)
    else:
        saved(tmp_path / "2", changed)
    monkeypatch.undo()
    latest = pc.latest_checkpoint(tmp_path)
    assert latest == (good if count <= len(STATE) else tmp_path / "2")
    bias = torch.zeros(2)
    read_checkpoint(latest, [(["a.bias"], bias)])
    assert bias.tolist() == ([1.0, 1.0] if count <= len(STATE) else [2.0, 2.0])


SCRIPT = """
import os, signal, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
state = {f"w{i}": torch.full((1000,), 1.0) for i in range(4)}
dcp.save(state, checkpoint_id=f"{sys.argv[1]}/00000010", no_dist=True)
plain, written = filesystem._write_item, []
def killed(transforms, stream, *rest):
    made = plain(transforms, stream, *rest)
    written.append(1)
    if len(written) == 2:
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return made
filesystem._write_item = killed
dcp.save({name: value + 1 for name, value in state.items()}, checkpoint_id=f"{sys.argv[1]}/00000020", no_dist=True)
"""


def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert any((tmp_path / "00000020").iterdir()), "it was killed in the middle"
    latest = pc.latest_checkpoint(tmp_path)
    assert latest == tmp_path / "00000010"
    weights = [torch.zeros(1000) for _ in range(4)]
    read_checkpoint(latest, [([f"w{number}"], weight) for number, weight in enumerate(weights)])
    assert all(bool((weight == 1).all()) for weight in weights)

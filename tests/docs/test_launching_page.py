"""docs/launching.md: its script runs under the launchers that this machine has, and all ranks agree on the loss."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the scripts of the page."""
    for name, text in re.findall(r"```python file=(\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def losses(folder: Path, started: list[tuple[list[str], dict[str, str]]]) -> list[str]:
    """Start commands with variables beside each other. Return what the ranks print as the loss, once they all ended well."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    usual = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            command, cwd=folder, env=usual | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for command, variables in started
    ]
    printed = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), printed
    return re.findall(r"rank \d+: (\S+)", "".join(out for out, _ in printed))


def assert_agreed(found: list[str]) -> None:
    assert len(found) == 2
    assert len({*found}) == 1


def command_of_page(beginning: str) -> list[str]:
    (text,) = re.findall(rf"```sh\n({beginning}.*)\n```", PAGE)
    return [*TORCHRUN, *shlex.split(text.replace("$HEAD:29400", f"localhost:{free_port()}"))[1:]]


def test_two_agents_meet_at_an_address(folder: Path) -> None:
    command = command_of_page("torchrun --nnodes=2")
    assert_agreed(losses(folder, [(command, {})] * 2))


def needs_full(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("a launcher beyond torchrun: --full")


def test_one_host(folder: Path, pytestconfig: pytest.Config) -> None:
    needs_full(pytestconfig)
    assert_agreed(losses(folder, [(command_of_page("torchrun --standalone"), {})]))


@pytest.mark.parametrize("elastic", [False, True])
def test_the_variables_of_a_pytorch_job(folder: Path, elastic: bool, pytestconfig: pytest.Config) -> None:
    needs_full(pytestconfig)
    port = str(free_port())
    fixed = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    free = {
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": "job",
        "PET_MAX_RESTARTS": "3",
    }
    variables = free | {"PET_RDZV_ENDPOINT": f"localhost:{port}"} if elastic else fixed
    started = [([*TORCHRUN, "train.py"], variables | ({} if elastic else {"PET_NODE_RANK": str(n)})) for n in range(2)]
    assert_agreed(losses(folder, started))


def test_tasks_of_slurm(folder: Path, pytestconfig: pytest.Config) -> None:
    needs_full(pytestconfig)
    if not shutil.which("srun") or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("needs a Slurm cluster, of any size")
    (text,) = re.findall(r"srun sh -c '(.*)'", PAGE)
    task = text.replace("python", sys.executable)
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    assert_agreed(losses(folder, [(["srun", "--ntasks=2", "--overcommit", "sh", "-c", task], variables)]))


def test_workers_of_ray(folder: Path, pytestconfig: pytest.Config) -> None:
    needs_full(pytestconfig)
    pytest.importorskip("ray.train", reason="needs Ray Train")
    assert_agreed([*{*losses(folder, [([sys.executable, "train_on_ray.py"], {})])}] * 2)

"""docs/launching.md: its script runs under the launchers that this machine has, and all ranks agree on the loss."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from pipecompile.parameters.checkpoint_damage import check_files

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


def test_hosts_that_are_left_go_on_with_the_losses_of_an_undisturbed_run(
    folder: Path, pytestconfig: pytest.Config
) -> None:
    """Three agents start a pipeline of three ranks; one is killed with its rank, and two ranks go on from the last checkpoint."""
    needs_full(pytestconfig)
    undisturbed = printed_losses(folder, [sys.executable, "-m", "torch.distributed.run", "--standalone", "elastic.py"])
    shutil.rmtree(folder / "out")
    command = elastic_command()
    agents = [agent(folder, command, number) for number in range(3)]
    try:
        wait_for(lambda: "step 3 on 3 ranks" in (folder / "0.log").read_text())
        kill_with_children(agents[2])
        codes = [process.wait(timeout=240) for process in agents[:2]]
        logs = "".join((folder / f"{number}.log").read_text() for number in range(3))
        assert codes == [0, 0], logs[-3000:]
    finally:
        for process in agents[:2]:
            if process.poll() is None:
                kill_with_children(process)
    found = re.findall(r"step (\d+) on (\d) ranks: (\S+)", logs)
    assert {ranks for _, ranks, _ in found} == {"3", "2"}
    last = {int(step): float(loss) for step, _, loss in found}
    assert last == pytest.approx(undisturbed, abs=2e-6)
    with warnings.catch_warnings(action="error"):  # what the killed rank has left damages no checkpoint
        for path in sorted((folder / "out").glob("*/.metadata")):
            check_files(path.parent)


def elastic_command() -> list[str]:
    (text,) = re.findall(r"```sh\nTORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (torchrun --nnodes=2:3.*)\n```", PAGE)
    words = shlex.split(text.replace("$HEAD:29400", f"localhost:{free_port()}"))[1:]
    return [*TORCHRUN, "--monitor-interval=0.2", *words]


def agent(folder: Path, command: list[str], number: int) -> subprocess.Popen[bytes]:
    """Start an agent in a process group of its own. The first one is where the agents meet; a lost one is noticed in seconds."""
    quick = f"--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,is_host={int(number == 0)}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = (folder / f"{number}.log").open("wb")
    at = command.index("elastic.py")
    return subprocess.Popen([*command[:at], quick, "elastic.py"], cwd=folder, env=os.environ | own, stdout=log, stderr=log,
                            start_new_session=True)  # fmt: skip


def printed_losses(folder: Path, command: list[str]) -> dict[int, float]:
    """Run the elastic script undisturbed. Return its losses by step."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=True, timeout=240)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) on \d ranks: (\S+)", done.stdout)}


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    for pid in (process.pid, *children_of(process)):
        os.kill(pid, signal.SIGKILL)


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    return [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]


def wait_for(is_so: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("lost", ["agent", "rank"])
def test_copies_go_on_without_an_agent_or_a_rank(folder: Path, lost: str, pytestconfig: pytest.Config) -> None:
    """Three agents start three copies; one is killed with its ranks, or one of its ranks alone."""
    needs_full(pytestconfig)
    (text,) = re.findall(r"```sh\n(torchrun --nnodes=3.*)\n```", PAGE)
    script, port = folder / "copies.py", free_port()
    script.write_text(
        script.read_text().replace(
            "    optimizer.zero_grad()", "    __import__('time').sleep(0.2)\n    optimizer.zero_grad()"
        )
    )
    options = shlex.split(text.replace("$HEAD:29400", f"localhost:{port}"))[1:-1]
    agents = [_agent(folder, [*options, f"--rdzv-conf=is_host={int(n == 0)}", "copies.py"], n) for n in range(3)]
    try:
        wait_for(lambda: "step 3 of copies (0, 1, 2)" in log_of(folder, 3))
        if lost == "rank":
            os.kill(children_of(agents[2])[-1], signal.SIGKILL)
        else:
            kill_with_children(agents[2])
        wait_for(lambda: "step 39 of copies (0, 1)" in log_of(folder, 3))
        assert "LostCopyWarning" in log_of(folder, 3)
        wait_for(lambda: (folder / "out" / "last_good").read_text() == f"{40:08d}")
    finally:
        for process in agents:
            if process.poll() is None:
                kill_with_children(process)


def _agent(folder: Path, options: list[str], number: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log = (folder / f"{number}.log").open("wb")
    return subprocess.Popen([*TORCHRUN, "--monitor-interval=0.2", *options], cwd=folder, stdout=log, stderr=log, start_new_session=True,
                            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})  # fmt: skip


def log_of(folder: Path, count: int) -> str:
    return "".join((folder / f"{number}.log").read_text() for number in range(count))


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

"""The ranks of questions to one peer: `python ranks.py PEER QUESTION...` prints a line of JSON for each question.

The peer is imported once; each rank of each question is a fork of this process, which itself does no work of torch.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from models import NotAsked
from questions import QUESTIONS, short

LIMIT = 200.0
"""Seconds after which a rank that has said nothing counts as one that waits for ever."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def lighthouse() -> tuple[subprocess.Popen[str], str]:
    """Start torchft's own server and return it with its address."""
    code = (
        "from torchft.coordination import LighthouseServer as S; import time;"
        "s = S(bind='127.0.0.1:0', min_replicas=1, join_timeout_ms=5000); print(s.address(), flush=True); time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def be_rank(peer: Any, question: str, rank: int, file: Path) -> NoReturn:
    """Answer the question in a child, and end."""
    atexit._clear()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(file.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    told: list[str] = []
    warnings.showwarning = lambda message, *_, **__: told.append(" ".join(str(message).split()))
    raised = None
    try:
        said = QUESTIONS[question][1](peer)
    except NotAsked as error:
        said = f"not asked: {error}"
    except BaseException as error:
        said, raised = short(error), error
    notes = [text for text in told if "checkpoint" in question and "checkpoint" in text]
    file.write_text(said + "".join(f"; warning: {text[:300]}" for text in notes))
    if raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)  # as the end of a script would call it
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ask(peer: Any, question: str) -> str:
    """Return what the ranks said; ranks that said the same as one."""
    with tempfile.TemporaryDirectory() as folder:
        world = QUESTIONS[question][0]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        os.environ["FOLDER"] = f"{folder}/checkpoints"
        files, children = [Path(folder) / f"rank{rank}" for rank in range(world)], []
        for rank, file in enumerate(files):
            if (child := os.fork()) == 0:
                be_rank(peer, question, rank, file)
            children.append(child)
        ends = wait(children)
        said = [file.read_text() if file.exists() else ends[child] for child, file in zip(children, files, strict=True)]
        if os.environ.get("PEERS_DEBUG"):
            for file in files:
                print(file.with_suffix(".txt").read_text()[-6000:], file=sys.stderr)
    if len(set(said)) == 1:
        return said[0]
    return "\n".join(
        f"rank {', '.join(str(r) for r, other in enumerate(said) if other == text)}: {text}"
        for text in dict.fromkeys(said)
    )


def wait(children: list[int]) -> dict[int, str]:
    """Return how each child ended. Stopped ones are killed when the others have ended, and all when the time is over."""
    ends: dict[int, str] = {}
    limit = time.monotonic() + LIMIT
    while left := [child for child in children if child not in ends]:
        over = time.monotonic() > limit
        if over or all(is_stopped(child) for child in left):
            for child in left:
                ends[child] = "was stopped" if is_stopped(child) else f"said nothing for {LIMIT:.0f} s"
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            continue
        for child in left:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ends[child] = f"ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.1)
    return ends


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout
        return str(getattr(importlib.import_module(package), "__version__", "from its repository"))


def main(name: str, *questions: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    server = None
    if name == "torchft":
        server, os.environ["LIGHTHOUSE"] = lighthouse()
    module = importlib.import_module(f"on_{name}")
    versions = ", ".join(f"{package} {version_of(package)}" for package in module.PACKAGES)
    for question in questions:
        said = ask(module.Peer, question)
        print("ANSWER " + json.dumps({"question": question, "said": said, "versions": versions}), flush=True)
    if server:
        server.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A sample of benchmarks/peers: two questions to pipecompile and to torch.distributed.pipelining, and the page of answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
UNEVEN, LOADER = "uneven last batch (10 samples, 4 micro-batches)", "rank whose loader raises"


SAID = {
    ("torch", UNEVEN): "Expected input batch_size (16) to match target batch_size",
    ("torch", LOADER): "ValueError: bad sample 17",
    ("pipecompile", UNEVEN): "equal to eager",
    ("pipecompile", LOADER): "rank 1 failed outside a step: ValueError: bad sample 17",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", [UNEVEN, LOADER])
@pytest.mark.parametrize("peer", ["torch", "pipecompile"])
def test_a_peer_answers(peer: str, question: str, tmp_path: Path) -> None:
    file, markdown = tmp_path / "answers.json", tmp_path / "page.md"
    command = [sys.executable, FOLDER / "run.py", "--peers", peer, "--questions", question]
    subprocess.run([*command, "--json", file, "--markdown", markdown], check=True, timeout=500, env=dict(os.environ))
    said = json.loads(file.read_text())[peer][question]["said"]
    assert SAID[peer, question] in said
    assert said in markdown.read_text()
    assert ("failed outside a step" in said) == ((peer, question) == ("pipecompile", LOADER))

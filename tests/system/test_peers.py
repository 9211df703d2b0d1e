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


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("pipecompile", {UNEVEN: "equal to eager", LOADER: "ValueError: bad sample 17"}),
        (
            "torch",
            {UNEVEN: "Expected input batch_size (16) to match target batch_size", LOADER: "ValueError: bad sample 17"},
        ),
    ],
)
def test_peers_answer(peer: str, said: dict[str, str], tmp_path: Path) -> None:
    file, markdown = tmp_path / "answers.json", tmp_path / "page.md"
    command = [sys.executable, FOLDER / "run.py", "--peers", peer, "--questions", ";".join(said)]
    subprocess.run([*command, "--json", file, "--markdown", markdown], check=True, timeout=500, env=dict(os.environ))
    answers = json.loads(file.read_text())[peer]
    text = markdown.read_text()
    for question, part in said.items():
        assert part in answers[question]["said"]
        assert answers[question]["said"] in text
    assert ("rank 1 failed outside a step: ValueError: bad sample 17" in answers[LOADER]["said"]) == (
        peer == "pipecompile"
    )

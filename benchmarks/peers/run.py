"""Each question of `questions.py` to each peer, on gloo ranks of this machine; what every rank said goes on a page.

    python benchmarks/peers/run.py --python VENV/bin/python [--peers torch,deepspeed] [--questions 'killed rank'] [--markdown benchmarks/results/peers.md]

The peers are not dependencies of this project. An environment for them:

    python -m venv VENV && VENV/bin/pip install torch networkx 'pulp[highs]<4' rich typer msgspec matplotlib \\
        torchtitan torchft-nightly megatron-core deepspeed dacite
    git clone https://github.com/huggingface/nanotron    # the package 0.4 does not import; then PYTHONPATH=nanotron/src
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from questions import QUESTIONS  # noqa: E402

PEERS = ["pipecompile", "torch", "torchtitan", "deepspeed", "megatron", "nanotron", "torchft"]

Answers = dict[str, dict[str, dict[str, str]]]
"""Peer, question, and what was said with which versions."""


def ask(python: str, peer: str, questions: list[str], answers: Answers, keep: Path | None) -> None:
    """Put these questions to a peer, and add what it says to the answers."""
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [python, str(HERE / "ranks.py"), peer, *questions]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    found = answers.setdefault(peer, {})
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                found[answer.pop("question")] = answer
                print(f"{peer}: {list(found)[-1]}: {answer['said']}", flush=True)
                if keep:
                    keep.write_text(json.dumps(answers, indent=1))
        errors = process.stderr.read()
    if process.returncode or os.environ.get("PEERS_DEBUG"):
        print(errors[-8000:], file=sys.stderr)


def page(answers: Answers, command: str) -> str:
    lines = ["# Beside peers", ""]
    lines += [f"`{command}`. What every rank said, word for word; ranks that said the same are one.", ""]
    for peer, found in answers.items():
        lines.append(f"- {peer}: {next((answer['versions'] for answer in found.values()), 'does not import')}")
    for question in QUESTIONS:
        lines += ["", f"## {question[0].upper()}{question[1:]}", "", "```text"]
        for peer in PEERS:
            if answer := answers.get(peer, {}).get(question):
                lines += [f"[{peer}]", answer["said"], ""]
        lines[-1] = "```"
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--questions", default=";".join(QUESTIONS))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path, help="keep answers here, and ask only what it does not have")
    options = parser.parse_args()
    answers = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for peer in filter(None, options.peers.split(",")):
        questions = [q for q in options.questions.split(";") if q not in answers.get(peer, {})]
        if questions:
            ask(options.python, peer, questions, answers, options.json)
    if options.markdown:
        options.markdown.write_text(page(answers, "python benchmarks/peers/run.py --python VENV/bin/python"))


if __name__ == "__main__":
    main()

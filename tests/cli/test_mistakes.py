"""A user's mistake ends with its exit code and a message that says what to write, never with a traceback."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

MODELS = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

def raises():
    raise RuntimeError("no weights here")

def gives_text():
    return "text"

def needs(width):
    return nn.Linear(width, width)

def words():
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        if float(x.sum()) > 0:
            return self.layer(x)
        return x

class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        raise ValueError("wrong in forward")
"""

SMALL = "m:small --input 12x8 --cost analytic"
MISTAKES = [
    ("", 2, "Usage"),
    ("plam m:small", 2, "plam"),
    ("plan", 2, "Missing argument 'MODEL'"),
    ("plan m:small", 2, "--input"),
    ("plan --input 12x8", 2, "Missing argument"),
    ("plan resnet18 --input 2x8", 2, "names no model"),
    ("plan torchvision: --input 2x8", 2, "names no model"),
    ("plan torchvision:resnet19 --input 2x8", 2, "resnet18"),
    ("plan nomodule:build --input 2x8", 2, "there is no module 'nomodule'"),
    ("plan m:smal --input 12x8", 2, "small"),
    ("plan m:needs --input 12x8", 2, "cannot be called without arguments"),
    ("plan m:raises --input 12x8", 2, "no weights here"),
    ("plan m:gives_text --input 12x8", 2, "not a torch.nn.Module"),
    ("plan broken:build --input 12x8", 2, "broken"),
    ("plan m:small --input 12xx8", 2, "is not a shape"),
    ("plan m:small --input 12x8:int64 --cost analytic --stages 2", 3, "same dtype"),
    ("check m:small --input 12x8:int64", 3, "same dtype"),
    ("plan m:small --input 12x8:int65", 2, "is not a shape"),
    ("plan m:small --input 0x8 --stages 2", 2, ""),
    ("plan m:small --input 12x9 --stages 2", 3, "shapes cannot be multiplied"),
    ("plan m:small --input 12x8 --input 12x8 --stages 2", 3, "takes 2 positional arguments"),
    ("plan m:small --input 999999999999x999999999 --stages 2", 2, ""),
    ("plan m:small --input 99999999999999999999x8 --stages 2", 2, "cannot be made"),
    ("plan .m:small --input 12x8", 2, "names no model"),
    (f"plan {SMALL} --stages 2 --devices ''", 2, "--devices '' is empty"),
    (f"plan {SMALL} --stages 2 --out ''", 2, "is not a directory"),
    (f"plan {SMALL} --stages 2 --plan ''", 2, "is not a file"),
    ("check x.csv --repair ''", 2, "is not a file"),
    ("show ''", 2, "is not a file"),
    ("hang '' --program ''", 2, "is not a file"),
    (f"plan {SMALL} --stages 2 --time-limit 0", 2, "--time-limit 0"),
    (f"plan {SMALL} --stages 2 --out m.py/x", 2, "is not a directory"),
    (f"plan {SMALL} --stages 2 --bandwidth inf", 2, "--bandwidth inf"),
    (f"plan {SMALL} --stages 2 --speeds 1,1e308", 2, "--speeds 1e+308 is more than 1e+40"),
    (f"plan {SMALL} --stages 0", 2, "--stages"),
    (f"plan {SMALL} --stages -1", 2, "--stages"),
    (f"plan {SMALL} --stages two", 2, "--stages"),
    (f"plan {SMALL} --stages 9", None, "--stages"),
    (f"plan {SMALL} --stages 2 --microbatches 0", 2, "--microbatches"),
    (f"plan {SMALL} --stages 2 --microbatches many", 2, "--microbatches"),
    (f"plan {SMALL} --stages 2 --schedule 1F1B2", 2, "1f1b"),
    (f"plan {SMALL} --stages 2 --schedule missing.csv", 2, "missing.csv"),
    (f"plan {SMALL} --stages 2 --memory-limit lots", 2, "lots"),
    (f"plan {SMALL} --stages 2 --memory-limit 1B", 4, "--memory-limit"),
    (f"plan {SMALL} --stages 2 --memory-limit 1GB,1GB,1GB", 2, "--memory-limit"),
    (f"plan {SMALL} --stages 2 --devices cuda:7", 2, "cuda:7"),
    (f"plan {SMALL} --stages 2 --devices tpu", 2, "tpu"),
    (f"plan {SMALL} --stages 2 --speeds fast", 2, "--speeds"),
    (f"plan {SMALL} --stages 2 --bandwidth fast", 2, "fast"),
    (f"plan {SMALL} --stages 2 --bandwidth missing.csv", 2, "missing.csv"),
    (f"plan {SMALL} --stages 2 --pin 9=0", 2, "9"),
    (f"plan {SMALL} --stages 2 --pin 0", 2, "--pin"),
    (f"plan {SMALL} --stages 2 --pin 0=5", 2, ""),
    (f"plan {SMALL} --stages 2 --split-before nothing", 2, "nothing"),
    (f"plan {SMALL} --stages 2 --keep-together nothing", 2, "nothing"),
    (f"plan {SMALL} --stages 2 --balance 1,1", 2, "--balance"),
    (f"plan {SMALL} --stages 2 --balance a,b", 2, "--balance"),
    (f"plan {SMALL} --stages 2 --optimizer adamm", 2, "adam"),
    (f"plan {SMALL} --stages 2 --checkpoint sometimes", 2, "sometimes"),
    (f"plan {SMALL} --stages 2 --checkpoint 1,0,1", 2, "--checkpoint"),
    (f"plan {SMALL} --stages 2 --partitioner magic", 2, "magic"),
    ("plan m:small --input 12x8 --cost magic", 2, "magic"),
    (f"plan {SMALL} --stages 2 --time-limit -1", 2, "--time-limit"),
    (f"plan {SMALL} --stages 2 --gap nan", 2, "--gap"),
    (f"plan {SMALL} --stages 2 --plan missing.json", 2, "missing.json"),
    (f"plan {SMALL} --stages 2 --plan m.py", 2, "m.py"),
    (f"plan {SMALL} --stages 2 --out m.py", 2, "m.py"),
    (f"plan {SMALL} --stages 2 --dispatch sideways", 2, "sideways"),
    (f"plan {SMALL} --stages 2 --compile-stages nothing", 2, "nothing"),
    (f"plan {SMALL} --colour red", 2, "--colour"),
    ("plan m:Branches --input 12x8 --stages 1", 3, ""),
    ("plan m:Fails --input 12x8 --stages 1", None, "wrong in forward"),
    (f"run {SMALL} --stages 2 --steps 0", 2, "--steps"),
    (f"run {SMALL} --stages 2 --optimizer sparse", 2, "sparse"),
    ("check m:small", 2, "--input"),
    ("check m:Fails --input 12x8", None, "wrong in forward"),
    ("check nothing.csv", 2, "nothing.csv"),
    ("check m.py", 2, ""),
    ("check empty.csv", 2, ""),
    ("check binary.csv", 2, ""),
    ("check .", 2, ""),
    ("schedule 1f1b --stages 0", 2, "--stages"),
    ("schedule 1f1b --microbatches -4", 2, "--microbatches"),
    ("schedule 1f1bb", 2, "1f1b"),
    ("schedule zbv --stages 3", 2, "zbv"),
    ("schedule 1f1b --stages 100000 --microbatches 100000", 2, "cells"),
    ("schedule m.py", 2, "m.py"),
    ("schedule auto --checkpoint auto", 2, "needs a model"),
    ("show nothing.json", 2, "nothing.json"),
    ("show empty.json", 2, ""),
    ("show m.py", 2, "m.py"),
    ("show .", 2, "directory"),
    ("show notes.txt", 2, ""),
    ("bench m:small --input 12x8 --steps 0", 2, "--steps"),
    ("plan m.py --input 12x8", 2, "m:build"),
    ("plan ./m.py:small --input 12x8", 2, "m:small"),
    ("plan timm:nosuch --input 2x8", 2, "timm:"),
    ("plan torch:resnet18 --input 2x8", 2, "torchvision:NAME"),
    ("plan hf:bert-base-uncased --input 2x8:int64", 2, "hf:bert\n"),
    ("check deepspeed:TrainSchedule --ranks 0", 2, "--ranks"),
    ("show m:small", 2, "plan.json, schedule.csv or program.txt"),
    ("schedule 1f1b 4 8", 2, "unexpected extra"),
    ("plan hf:lama --input 2x8:int64", 2, "hf:llama"),
    ("plan hf:gpt2,n_layer=3,n_layer=4 --input 2x8:int64", 2, "'n_layer' of GPT2Config is there twice"),
    ("plan hf:gpt2,n_layr=3 --input 2x8:int64", 2, "n_layer"),
    ("plan hf:gpt2,n_layer=many --input 2x8:int64", 2, "hf:gpt2"),
    ("plan m:words --input 12x8", 3, "--input 2x128:int64"),
    ("plan m.small --input 12x8", 2, "m:small"),
    ("plan m:small --input 12×8", 2, "--input 12x8"),  # noqa: RUF001 as a formula is pasted
    ("plan m:small --input '12, 8'", 2, "--input 12x8"),
    ("plan m:small --input '(12,8):int64'", 2, "is not a shape"),
    (f"plan {SMALL} --stages 2 --out m.py", 2, "is a file, not a directory"),
    ("schedule gpipe --out m.py", 2, "is a file, not a directory"),
    ("schedule two.csv", 2, "where  two.csv, row 1 (line 2)"),
    ("hang m.py --program m.py", 2, "where  m.py, line 2"),
    ("check faulty.csv --eval", 2, "--eval is about a model"),
    ("check faulty.csv --seed 3", 2, "--seed is about a model"),
    ("schedule faulty.csv", 5, "stage 1 never runs B"),
    ("show faulty.csv", 5, "stage 1 never runs B"),
    ("check empty.json", 2, "pipecompile show empty.json"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "m.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "faulty.csv").write_text("0F0,0B0\n1F0\n")
    (tmp_path / "two.csv").write_text("0F0,0B0\n0F1,0B1\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("these are notes\n")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    for name in ("m", "broken"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    __import__("importlib").invalidate_caches()
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("words", "code", "message"), MISTAKES, ids=[words for words, _, _ in MISTAKES])
def test_a_mistake_has_an_exit_code_and_a_message(real, words, code, message):
    outcome = real(*shlex.split(words))
    text = outcome.err + outcome.out
    assert outcome.code == code if code else outcome.code in (1, 2, 3, 4, 5), text
    assert message in text
    assert "Traceback" not in text
    assert len(text) > 20

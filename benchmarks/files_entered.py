"""How many files of pipecompile Python enters: for compile() of torchvision's ResNet-18 in two stages, and for a warm step.

    python benchmarks/files_entered.py            the two numbers
    python benchmarks/files_entered.py --list     and the files, with the functions that were entered in each

A reader who debugs a call has to open these files at most.
"""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torchvision
from torch.nn.functional import cross_entropy

import pipecompile as pc

PACKAGE = str(Path(pc.__file__).parent) + "/"


def files_entered(function: Callable[[], Any]) -> tuple[Any, dict[str, set[str]]]:
    """Return the result of `function`, and per file of pipecompile the names of the functions that Python entered."""
    entered: dict[str, set[str]] = defaultdict(set)

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or of a class
        if event == "call" and is_function and frame.f_code.co_filename.startswith(PACKAGE):
            entered[frame.f_code.co_filename.removeprefix(PACKAGE)].add(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, dict(entered)


def report(title: str, entered: dict[str, set[str]], is_listed: bool) -> None:
    """Print one number, and on request each file with its functions."""
    print(f"{title}: {len(entered)} files")
    for name in sorted(entered) if is_listed else ():
        print(f"  {name:45} {' '.join(sorted(entered[name]))}")


def main() -> None:
    """Count the files of one compile and of one warm step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files and the functions entered in each")
    arguments = parser.parse_args()
    for module in pkgutil.walk_packages([PACKAGE], "pipecompile."):
        if not module.name.endswith("__main__"):
            import_module(module.name)  # so that an import inside a function is not counted
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 1000, (8,))
    model = torchvision.models.resnet18()
    compile_model = pc.compile  # imports pipecompile.compiling
    pipe, compiling = files_entered(
        lambda: compile_model(
            model,
            2,
            n_microbatches=4,
            example_args=(images,),
            loss_fn=cross_entropy,
            cost="analytic",
            batch_norm="each",
            dispatch="inline",
        )
    )
    for _ in range(3):
        pipe.step(images, target=labels)
    _, stepping = files_entered(lambda: pipe.step(images, target=labels))
    report("compile(resnet18, n_stages=2)", compiling, arguments.list)
    report("a warm step", stepping, arguments.list)


if __name__ == "__main__":
    main()

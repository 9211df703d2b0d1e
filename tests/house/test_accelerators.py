"""The runtime is about `torch.accelerator`, `torch.Stream` and `torch.Event`; `torch.cuda` appears in the modules named here alone."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pipecompile"

CUDA_ONLY = {
    "costs/device_specs.py": "data sheets of NVIDIA's cards, found by name, memory and number of multiprocessors",
    "runtime/cuda_graphs/capture.py": "CUDA graphs",
    "runtime/green_contexts.py": "parts of the multiprocessors of a card",
    "torch_private/device_functions.py": "what only CUDA has: pools of failed captures, an idle kernel, the identity of a card",
}


def names_cuda(tree: ast.AST) -> bool:
    """Return whether a file uses `torch.cuda`, by any way to import it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            return True
        if isinstance(node, ast.ImportFrom) and ((node.module or "") + ".").startswith("torch.cuda."):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and "cuda" in [one.name for one in node.names]:
            return True
        if isinstance(node, ast.Import) and any(one.name.startswith("torch.cuda") for one in node.names):
            return True
    return False


def test_torch_cuda_is_used_in_the_named_modules_alone() -> None:
    found = {
        str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if names_cuda(ast.parse(file.read_text()))
    }
    assert found == set(CUDA_ONLY)


def test_each_way_to_use_it_is_found() -> None:
    for line in (
        "torch.cuda.x()",
        "from torch.cuda import x",
        "from torch.cuda.y import x",
        "from torch import cuda",
        "import torch.cuda",
    ):
        assert names_cuda(ast.parse(line)), line
    assert not names_cuda(ast.parse("torch.accelerator.x()"))

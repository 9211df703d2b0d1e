"""Writes docs/report.png: the report of ResNet-101 in four stages, photographed in Chromium.

python docs/report.py          needs torchvision and Chromium; the measured times are those of this machine
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_suffix(".png")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--virtual-time-budget=3000")  # fmt: skip


def browser() -> str | None:
    """Return the path of Chromium or Chrome, None if there is neither."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def photograph(page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Write a PNG of the page, `width` by `height` pixels, in the light or the dark scheme. Raise OSError without a browser."""
    path = browser()
    if path is None:
        raise FileNotFoundError(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        target = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={picture}"]
        command = [path, *FLAGS, scheme, *target, page.resolve().as_uri()]
        subprocess.run(command, capture_output=True, timeout=120, check=True)


def main() -> None:
    """Compile, run two steps, write the report and its picture."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet101

    import pipecompile as pc

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the stages share the cores
    x, y = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))
    pipe = pc.compile(
        resnet101(num_classes=10), 4, n_microbatches=8, example_args=(x,), loss_fn=cross_entropy, batch_norm="each"
    )
    for _ in range(2):
        pipe.step(x, target=y)
    with tempfile.TemporaryDirectory() as folder:
        photograph(pipe.report(Path(folder) / "report.html"), PICTURE, 1240, 3300)


if __name__ == "__main__":
    main()

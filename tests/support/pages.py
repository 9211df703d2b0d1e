"""What the tests of the report share: its data, node to run its scripts in, a browser to open it in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=3000",
    "--window-size=1200,1600",
)


def data_of(page: str) -> dict[str, Any]:
    """The JSON inside."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def scripts() -> Path:
    import pipecompile.show

    return Path(pipecompile.show.__file__).parent / "page"


def run_script(source: str) -> Any:
    """What a script prints as JSON, run in node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    done = subprocess.run([node, "-"], input=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def opened(page: str, folder: Path, act: str = "") -> str:
    """The page as a browser has it, after the script `act` has run in it. Errors of scripts are in the attribute `data-error`."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium")
    caught = "<script>onerror = (message) => { document.documentElement.dataset.error = message; };</script>"
    path = folder / "page.html"
    path.write_text(page.replace("<head>", f"<head>{caught}").replace("</body>", f"<script>{act}</script></body>"))
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "data-error" not in done.stdout.split(">", 2)[1], done.stdout[:300]
    return done.stdout

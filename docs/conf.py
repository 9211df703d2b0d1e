"""Configuration of the documentation site: Sphinx reads the Markdown pages of this folder and the docstrings of the package.

python -m sphinx -W --keep-going -b html docs out/site          part of `make docs`; needs no network
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

from pipecompile import __version__ as release

project = "pipecompile"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["schedules/*"]
myst_heading_anchors = 3
default_role = "code"
smartquotes = False  # quotes are those of Python
autodoc_typehints = "none"
html_theme = "furo"
html_title = f"pipecompile {release}"
html_show_copyright = False
html_show_sourcelink = False

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
"""A link to a file of the repository that is not a page of the site: text, path."""


def _show_paths(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Replace links to files outside of the site by their paths: a browser cannot follow these links."""
    source[0] = _OUTSIDE.sub(
        lambda match: f"{match[1]} (`{match[2]}`)" if match[1] not in match[2] else f"`{match[2]}`", source[0]
    )


def setup(app: Sphinx) -> None:
    """Register the change of links."""
    app.connect("source-read", _show_paths)

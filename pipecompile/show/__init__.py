"""Views of plans, schedules, programs and timelines: tables, text grids, charts, traces, graphs and HTML pages.

    terminal   table.py, grid.py
    notebook   stage_picture.py (SVG); notebook.py, which registers the HTML forms of plans, schedules, programs and timelines
    files      dump.py writes all; gantt.py (SVG), perfetto.py (trace), graphviz.py (DOT), html_report.py (page/)

Data below do not import their views. matplotlib is imported only when a chart is drawn. Open `table.py` first.
"""

from __future__ import annotations

from pipecompile.show.dump import dump, write_text
from pipecompile.show.gantt import timeline_svg
from pipecompile.show.graphviz import graph_dot
from pipecompile.show.grid import timeline_grid
from pipecompile.show.html_report import report_html
from pipecompile.show.notebook import pipeline_html
from pipecompile.show.perfetto import timeline_trace
from pipecompile.show.stage_picture import StagePicture, stage_picture
from pipecompile.show.table import StageTable, render

__all__ = [
    "StagePicture",
    "dump",
    "graph_dot",
    "pipeline_html",
    "render",
    "report_html",
    "stage_picture",
    "StageTable",
    "timeline_grid",
    "timeline_svg",
    "timeline_trace",
    "write_text",
]

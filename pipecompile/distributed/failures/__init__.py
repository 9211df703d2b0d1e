"""Failures of ranks: their reports to other ranks, and the errors that these raise. Open `status_board.py` first.

failure_guard ── posts ──► status_board ◄── reads ── posted_wait, board_watch      failure_report: rank, place, action
"""

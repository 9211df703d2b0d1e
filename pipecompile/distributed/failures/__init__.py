"""Failures of ranks: how the others hear of them, and what the error says. Open `status_board.py` first.

failure_guard ── posts ──► status_board ◄── reads ── posted_wait, board_watch      failure_report: who, where, which action
"""

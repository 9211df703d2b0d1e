"""Hangs of ranks, explained by the dumps of torch's flight recorder. Open `hang_report.py` first."""

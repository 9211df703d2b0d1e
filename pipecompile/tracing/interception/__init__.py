"""How the recorder hears of what a model does: torch, the dispatcher, and Python's own questions."""

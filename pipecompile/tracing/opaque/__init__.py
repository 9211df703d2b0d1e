"""Pieces that cannot be recorded: which, what they give, and the node that runs them."""

"""Outlining: a few statements of the user's function become a function of their own, so that they can be one opaque node.

Open `code_blocks.py` first: it finds the statements around a line. `name_flow` finds the names that statements read and
assign, `outlined_code` compiles a function with its statements outlined, and `outlined_calls` puts such functions into the model
while it is recorded.
"""

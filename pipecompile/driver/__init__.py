"""The driver: one compilation from model to executable, and what a pipeline keeps between compilations.

Open `phases.py` first: it is the whole compilation on one page. `compile_cache` finds or compiles a specialization for a call,
`programs` lowers and binds its steps, `backend` has what ranks do differently, `inspection` serves `pipe.dump` and `pipe.report`.
"""

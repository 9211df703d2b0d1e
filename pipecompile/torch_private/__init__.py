"""The only door to torch's private names: everything that begins with an underscore there is imported here, and nowhere else.

A public name of a file in this folder stands for one private name of torch, or for a few that are always used together. Each
says what it does and since which torch it is known to exist; "2.11" is the oldest torch that pipecompile supports, and all
names are checked on it and on the newest. When torch moves a private name, one line of this folder changes.

Names that are used in every step are bound, not wrapped: a call costs what torch's own costs.

`tests/house/test_private_torch.py` refuses underscored torch in all other folders. Open `modules.py` or `modes.py` first.
"""

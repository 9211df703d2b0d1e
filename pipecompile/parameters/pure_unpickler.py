"""The unpickler that is written in Python. That of C reserves memory for any number that a memo entry has: nine bytes of a file took 4 GiB."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pickle import Unpickler as PureUnpickler
else:
    PureUnpickler = vars(pickle)["_Unpickler"]

__all__ = ["PureUnpickler"]

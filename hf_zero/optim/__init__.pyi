# Written by packaging/stubs.py from the table in __init__.py; a test compares them.
from hf_zero.optim.lion import Lion as Lion
from hf_zero.optim.onebit_adam import OneBitAdam as OneBitAdam

__all__ = [
    "OneBitAdam",
    "Lion",
]

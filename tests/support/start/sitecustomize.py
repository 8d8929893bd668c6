"""Start-up code of the processes that tests start: the alias where hf_zero is not installed, and a collector that runs rarely.

A fifth of the imports of torch and transformers is the work of the garbage collector, which finds nothing.
"""

import gc
import importlib.util

gc.set_threshold(100_000, 50, 50)
if importlib.util.find_spec("_hf_zero_startup") is not None:
    importlib.import_module("_hf_zero_startup")

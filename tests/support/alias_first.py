"""Imported by the rank server before transformers: makes ``import deepspeed`` find hf_zero, as an installed wheel does at start-up.

transformers decides at import whether DeepSpeed exists, so the answer must be there before it.
"""

import logging
import threading
import traceback

from tqdm.std import tqdm

tqdm.set_lock(threading.RLock())  # tqdm's own lock holds a semaphore, which the server, ended by a signal, would leave behind

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses kernels of the hub, whenever PEFT is imported

try:
    import hf_zero

    hf_zero.install_as_deepspeed()
except Exception:  # the server must live: tests of the alias then fail with their own message, the others run
    traceback.print_exc()

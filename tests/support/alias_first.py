"""Module that the rank server imports before transformers: makes ``import deepspeed`` find hf_zero, like an installed wheel at start-up.

transformers decides at its import whether DeepSpeed exists, so the alias must be active before it.
"""

import logging
import threading
import traceback

from tqdm.std import tqdm

tqdm.set_lock(threading.RLock())  # tqdm's own lock has a semaphore, which a server ended by a signal would leave behind

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about missing hub kernels whenever PEFT is imported

try:
    import hf_zero

    hf_zero.install_as_deepspeed()
except Exception:  # the server must not end: tests of the alias then fail with their own messages, other tests run
    traceback.print_exc()

"""End of a rank whose launcher is killed."""

from __future__ import annotations

import ctypes
import os
import signal

from hf_zero.errors import ConfigError
from hf_zero.system.c_library import linux_function

VARIABLE = "HF_ZERO_LAUNCHER"  # the number of the process that starts the ranks of this machine
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Has the kernel end this process when `hf-zero launch`, which started it, is gone.

    A launcher that is ended by a signal it can hear ends its ranks itself; after ``kill -9`` they would wait for each other until their
    time is out, and hold their devices. Linux alone has this. Processes that a rank starts (workers of a loader) are not meant: they have
    the variable, and another parent.

    Raises:
        ConfigError: The launcher is gone already.
    """
    number = os.environ.get(VARIABLE, "")
    if number != str(os.getppid()):
        return
    function = linux_function("prctl", ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    if function is None:
        return
    function(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(number):  # it went between the two
        raise ConfigError(f"the launcher, process {number}, has been killed: this rank ends as well")

"""End a rank when its launcher is killed."""

from __future__ import annotations

import ctypes
import os
import signal

from hf_zero.errors import ConfigError
from hf_zero.system.c_library import linux_function

VARIABLE = "HF_ZERO_LAUNCHER"  # process ID of the launcher that starts the ranks of this machine
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Ask the kernel to kill this process when its parent, `hf-zero launch`, ends. Linux only.

    A launcher that receives a signal it can handle ends its ranks itself. After ``kill -9`` the ranks would wait for each other until
    their timeout, and occupy their devices. Child processes of a rank (workers of a loader) are not affected: they inherit the variable but
    have another parent.

    Raises:
        ConfigError: The launcher has already ended.
    """
    number = os.environ.get(VARIABLE, "")
    if number != str(os.getppid()):
        return
    function = linux_function("prctl", ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    if function is None:
        return
    function(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(number):  # the launcher ended between the two calls
        raise ConfigError(f"the launcher (process {number}) was killed, so this rank ends too")

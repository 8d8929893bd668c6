"""Start the script of one rank: with ``--local_rank``, as DeepSpeed's launcher does and torchrun does not, and with output of its own.

On a node of `hf-zero launch` over ssh, each rank writes into pipes of the node's agent (``agent``), so its lines stay whole and have its
rank in front. torchrun starts this module instead of the script, and this module replaces itself by the script. A rank also ends when its
launcher is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.launch.agent import OUTPUTS, REPORT
from hf_zero.launch.placement import export_placement
from hf_zero.system.process import linux_function
from hf_zero.system.text_file import LIMIT_BYTES, read_bytes

_DECLARED = re.compile(r"""["']--local_rank["']""")
_FLAGS = ("--local_rank", "--module", "--no_python")
VARIABLE = "HF_ZERO_LAUNCHER"  # process ID of the launcher that starts the ranks of this machine
_PR_SET_PDEATHSIG = 1


def wants_local_rank(options: argparse.Namespace) -> bool:
    """Return whether the script in ``options`` declares the argument ``--local_rank``; scripts that do not would reject it."""
    if options.no_local_rank or options.no_python or options.module:
        return False
    try:
        return _DECLARED.search(read_bytes(options.script, LIMIT_BYTES).decode("utf-8", errors="replace")) is not None
    except (OSError, ValueError):
        return False  # the interpreter will report the missing script


def main() -> None:
    """Replace this process by the script in its arguments, which begin with flags: ``--local_rank`` passes this argument on, the others
    say that the script is a module or a program.
    """
    words, flags = sys.argv[1:], set()
    while words[0] in _FLAGS:
        flags.add(words.pop(0))
    script, *arguments = words
    if "--local_rank" in flags:
        arguments.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    _take_pipes()
    if "--no_python" in flags:
        os.execvp(script, [script, *arguments])  # nosec B606
    os.execv(sys.executable, [sys.executable, "-u", *(["-m"] if "--module" in flags else []), script, *arguments])  # nosec B606


def _take_pipes() -> None:
    """Make the agent's pipes for this rank its output and errors, if there are any; children of the rank inherit them like any output."""
    place, _ = os.environ.pop(OUTPUTS, ""), os.environ.pop(REPORT, None)
    if not place:
        return
    agent, *numbers = place.split(",")
    first = 2 * int(os.environ["LOCAL_RANK"])
    for stream, number in enumerate(numbers[first : first + 2], start=1):
        if stat.S_ISREG(os.fstat(stream).st_mode):
            continue  # torchrun writes this stream to a file
        try:
            pipe = os.open(f"/proc/{agent}/fd/{number}", os.O_WRONLY)
        except OSError:
            return  # its lines then come through torchrun, without the rank in front
        os.dup2(pipe, stream)
        os.close(pipe)


if __name__ == "__main__":
    main()


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


def start_state(method: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``PartialState.__init__``: first set the rank variables; ``TrainingArguments`` and ``Accelerator`` also make this object."""
    export_placement()
    end_with_launcher()
    method(state, *args, **kwargs)

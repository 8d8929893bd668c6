"""Pass ``--local_rank`` to a script, as DeepSpeed's launcher does and torchrun does not."""

from __future__ import annotations

import argparse
import os
import re
import sys

from hf_zero.system.text_file import LIMIT_BYTES, read_bytes

_DECLARED = re.compile(r"""["']--local_rank["']""")


def is_wanted(options: argparse.Namespace) -> bool:
    """Return whether the script in ``options`` declares the argument ``--local_rank``; scripts that do not would reject it."""
    if options.no_local_rank or options.no_python or options.module:
        return False
    try:
        return _DECLARED.search(read_bytes(options.script, LIMIT_BYTES).decode("utf-8", errors="replace")) is not None
    except (OSError, ValueError):
        return False  # the interpreter will report the missing script


def main() -> None:
    """Replace this process by the script in the first argument, with ``--local_rank`` before its other arguments."""
    script, *arguments = sys.argv[1:]
    os.execv(sys.executable, [sys.executable, "-u", script, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments])


if __name__ == "__main__":
    main()

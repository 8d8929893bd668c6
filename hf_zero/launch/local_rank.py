"""``--local_rank``, which DeepSpeed's launcher adds to the arguments of a script and torchrun does not."""

from __future__ import annotations

import argparse
import os
import re
import sys

from hf_zero.system.text_file import LIMIT_BYTES, read_bytes

_DECLARED = re.compile(r"""["']--local_rank["']""")


def is_wanted(options: argparse.Namespace) -> bool:
    """Return whether the script that ``options`` of the launcher name declares the argument itself: others would refuse it."""
    if options.no_local_rank or options.no_python or options.module:
        return False
    try:
        return _DECLARED.search(read_bytes(options.script, LIMIT_BYTES).decode("utf-8", errors="replace")) is not None
    except (OSError, ValueError):
        return False  # the interpreter says that there is no such script


def main() -> None:
    """Becomes the script of the first argument, with the local rank before its other arguments."""
    script, *arguments = sys.argv[1:]
    os.execv(sys.executable, [sys.executable, "-u", script, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments])


if __name__ == "__main__":
    main()

"""Run a worker script with this folder's ``benchmarks`` importable, and nothing else of this repository.

    python benchmarks/common/run_worker.py WORKER [ARGUMENT ...]

A worker may run with the Python of a peer's venv, or measure the ``hf_zero`` of another checkout: the repository in its ``sys.path`` would
show it this package as well.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Import ``benchmarks`` from here, whatever else has that name, and run the worker as ``__main__``."""
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder, which Python put there
    import benchmarks.common  # noqa: F401 - from now on its path says where its modules are

    del sys.path[0], sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""Run a worker script so that it can import this folder's ``benchmarks``, but no other package of this repository.

    python benchmarks/common/run_worker.py WORKER [ARGUMENT ...]

A worker may run with the Python of a peer's venv, or measure the ``hf_zero`` of another checkout; with the repository in ``sys.path`` it
would import this hf_zero as well.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Import ``benchmarks`` from this repository, even if another package has that name, and run the worker as ``__main__``."""
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # replaces this folder, which Python put there
    import benchmarks.common  # noqa: F401 - later imports use its path

    del sys.path[0], sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

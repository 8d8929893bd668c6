"""Start all parts: ``python -m benchmarks.gpu``."""

import sys

from benchmarks.gpu.parts import main

if __name__ == "__main__":
    sys.exit(main())

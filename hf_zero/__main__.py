"""``python -m hf_zero``: the command ``hf-zero``."""

import sys

from hf_zero.cli import main

if __name__ == "__main__":
    sys.exit(main())

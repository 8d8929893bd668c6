"""Print the lower bounds of pyproject.toml as exact versions, which `make test-oldest` installs.

    python packaging/oldest.py torch==2.13.0

Arguments replace the bound of the same name. Standard library only, for Python 3.10 as well.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest(overruled: list[str]) -> list[str]:
    """Return ``name==version`` of every dependency that has a lower bound, or the argument that replaces it."""
    text = re.search(r"^dependencies = \[(.*?)^\]", PROJECT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert text
    bounds = dict(re.findall(r'"([\w.-]+)>=([\w.]+)"', text[1]))
    return [f"{name}=={version}" for name, version in (bounds | dict(item.split("==") for item in overruled)).items()]


if __name__ == "__main__":
    print("\n".join(oldest(sys.argv[1:])))

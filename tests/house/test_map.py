"""The picture of the house fits the imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import REPO


@pytest.mark.quick
def test_the_map_is_drawn_from_the_imports_of_today() -> None:
    done = subprocess.run([sys.executable, "tools/house_map.py", "--check"], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

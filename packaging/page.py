"""Write the page that the package index shows: README.md with absolute links, because relative links do not work there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "packaging" / "page.md"  # named in pyproject.toml, ignored by git
_PICTURES = (".png", ".svg")
# `](path)` of Markdown, and `src="path"` and the like of HTML; links with a scheme, and links inside the page, are kept.
_LINK = re.compile(r"(?P<before>\]\(|\b(?:src|srcset|href)=\")(?![a-z]+:|#)(?P<path>[^)\s\"]+)")


def page() -> str:
    """Return README.md with links to the files of this version.

    Raises:
        ValueError: The version or the address of the repository is missing.
    """
    version = re.search(r'^__version__ = "(.+?)"', (ROOT / "hf_zero" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    repository = re.search(r'^Repository = "(.+?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if version is None or repository is None:
        raise ValueError("hf_zero/__init__.py needs __version__, and pyproject.toml needs project.urls.Repository")
    address, tag = repository[1], f"v{version[1]}"

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["path"].endswith(_PICTURES) else "blob"
        return f"{link['before']}{address}/{kind}/{tag}/{link['path']}"

    return _LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


def write() -> None:
    """Write the page; setuptools reads it as the project's readme."""
    PAGE.write_text(page(), encoding="utf-8")

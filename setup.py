"""Gives the page that the package index shows: README.md with absolute links. Everything else stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PICTURES = (".png", ".svg")


def page() -> str:
    """README.md, whose links to files of the repository lead to the files of this version, and whose pictures are shown."""
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+?)"', (HERE / "hf_zero" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    repository = re.search(r'^Repository = "(.+?)"', project, re.MULTILINE)
    assert version and repository

    def absolute(link: "re.Match[str]") -> str:
        kind = "raw" if link["path"].endswith(PICTURES) else "blob"
        return f"{link['before']}{repository[1]}/{kind}/v{version[1]}/{link['path']}"

    text = (HERE / "README.md").read_text(encoding="utf-8")
    # `](path)` of Markdown, and `src="path"` or the like of HTML; links that have a scheme or lead into the page stay.
    return re.sub(r"(?P<before>\]\(|\b(?:src|srcset|href)=\")(?![a-z]+:|#)(?P<path>[^)\s\"]+)", absolute, text)


setup(long_description=page(), long_description_content_type="text/markdown")

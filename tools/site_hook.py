"""Hooks of mkdocs: pages that are made at build time (reference, files outside docs/), and links to them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkdocs.structure.files import File, Files

from tools import reference_pages
from tools.outside_pages import MOVED, Outside

_outside = Outside()


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    global _outside
    _outside = Outside()
    _outside.collect()
    for name in MOVED:
        if (moved := files.get_file_from_path(name.removeprefix("docs/"))) is not None:
            files.remove(moved)
    for uri, text in {**_outside.pages, **reference_pages.pages()}.items():
        files.append(File.generated(config, uri, content=text))
    for uri, path in _outside.images.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by links to their pages."""
    return _outside.rewritten(page.file.src_uri, markdown)

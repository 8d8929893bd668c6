"""Find the files outside docs/ that pages link to, and give each a page of the site, so that links stay inside the site."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import relpath

REPO = Path(__file__).resolve().parent.parent
DOCS = REPO / "docs"
# Pages that have another address on the site than in the repository.
MOVED = {"README.md": "index.md", "docs/README.md": "pages.md", "CONTRIBUTING.md": "contributing.md"}
OUTSIDE = "repository"
IMAGES = (".png", ".svg", ".jpg", ".gif")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".cpp": "cpp"}
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=[)\s])")
_ATTRIBUTE = re.compile(r'(?<=\ssrc=")[^"]+(?=")|(?<=\shref=")[^"]+(?=")|(?<=\ssrcset=")[^"]+(?=")')


def replaced(markdown: str, change: Callable[[str], str]) -> str:
    """Return ``markdown`` with each link target replaced by ``change(target)``; code, in blocks or in a line, is not changed."""

    def in_text(text: str) -> str:
        return _ATTRIBUTE.sub(lambda found: change(found[0]), _LINK.sub(lambda found: change(found[0]), text))

    def around(pattern: re.Pattern[str], text: str, work: Callable[[str], str]) -> str:
        parts, end = [], 0
        for found in pattern.finditer(text):
            parts += [work(text[end : found.start()]), found[0]]
            end = found.end()
        return "".join([*parts, work(text[end:])])

    # A link around code, [`name`](target), has its target after the code, so looking at the parts between code is enough.
    return around(_FENCE, markdown, lambda text: around(_CODE, text, in_text))


def is_local(target: str) -> bool:
    """Return whether a link target is a path, not an address or a heading of the same page."""
    return not re.match(r"[a-z][a-z0-9+.-]*:|#|//", target)


@dataclass
class Outside:
    """Pages for files outside docs/ (address on the site -> text), and the images that they show."""

    pages: dict[str, str] = field(default_factory=dict)
    images: dict[str, Path] = field(default_factory=dict)
    sources: dict[str, Path] = field(default_factory=dict)  # address on the site -> file of the repository

    def collect(self) -> None:
        """Read docs/ and the pages of ``MOVED``, follow their links outside docs/, and fill ``pages`` and ``sources``."""
        for path in dict.fromkeys([*sorted(DOCS.rglob("*.md")), *(REPO / name for name in MOVED)]):
            self.sources[uri_of(path)] = path
            self._follow(path)
        for moved in MOVED.values():
            self.pages[moved] = self.sources[moved].read_text(encoding="utf-8")

    def _follow(self, page: Path) -> None:
        for target in local_targets(page):
            path = (page.parent / target.partition("#")[0]).resolve()
            if path.is_relative_to(REPO) and path.exists() and not path.is_relative_to(DOCS):
                self._add(path)

    def _add(self, path: Path) -> None:
        uri = uri_of(path)
        if uri in self.sources:
            return
        if path.is_dir():
            inside = sorted(child for child in path.iterdir() if child.suffix in (*LANGUAGES, ".md") and child.is_file())
            self.sources[uri] = path / "README.md"
            lines = [f"- [{child.name}]({child.name})" for child in inside]
            self.pages[uri] = "\n".join([f"# {path.relative_to(REPO)}", "", *lines, ""])
            for child in inside:
                self._add(child)
        elif path.suffix in IMAGES:
            self.sources[uri] = self.images[uri] = path
        elif path.suffix == ".md":
            self.sources[uri] = path
            self.pages[uri] = path.read_text(encoding="utf-8")
            self._follow(path)
        else:
            self.sources[uri] = path
            text = path.read_text(encoding="utf-8")
            fence = "`" * 4
            self.pages[uri] = f"# {path.relative_to(REPO)}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"

    def rewritten(self, uri: str, markdown: str) -> str:
        """Return the page at ``uri`` with links to the site's addresses; a dead link stays, for the strict build to report."""
        source = self.sources.get(uri)
        if source is None:
            return markdown

        def change(target: str) -> str:
            if not is_local(target):
                return target
            name, mark, heading = target.partition("#")
            path = (source.parent / name).resolve()
            if not path.is_relative_to(REPO) or not path.exists():
                return target
            return relpath(uri_of(path), Path(uri).parent.as_posix()) + mark + heading

        return replaced(markdown, change)


def local_targets(page: Path) -> Iterator[str]:
    """Yield the link targets of a page that are paths."""
    found: list[str] = []

    def keep(target: str) -> str:
        found.append(target)
        return target

    replaced(page.read_text(encoding="utf-8"), keep)
    yield from filter(is_local, found)


def uri_of(path: Path) -> str:
    """Return the address of a file or folder of the repository on the site, relative to its root, as the name of a Markdown file."""
    if path.is_dir():
        path = path / "README.md"
    name = path.relative_to(REPO).as_posix()
    if name in MOVED:
        return MOVED[name]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"{OUTSIDE}/{name}" if path.suffix in (".md", *IMAGES) else f"{OUTSIDE}/{name}.md"

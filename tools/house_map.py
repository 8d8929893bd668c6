"""Draw which package of hf_zero imports which, from the import statements, as docs/pictures/house.svg.

    python tools/house_map.py            # write the picture
    python tools/house_map.py --check    # exit with 1 if it no longer matches the code

Rows and columns are packages from the ground up. A dot says that the package of the row imports the package of the column; all dots lie
below the diagonal, because imports go in one direction.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "house.svg"
CELL, LEFT, TOP, RIGHT, BOTTOM = 18, 170, 150, 90, 44  # pixels; turned labels reach over the last column


def package_of(module: str) -> str:
    """Return the package of a dotted module name: its first name below ``hf_zero``, the first two inside ``core``; "" for the root."""
    names = module.split(".")[1:]
    if not names or names[0].startswith("__"):
        return ""
    folder = len(names) > 1 and (ROOT / "hf_zero" / "core" / names[1]).is_dir()
    inside = names[0] == "core" and (folder or names[1:] == ["stages"])  # the table of stages is below the packages of the core
    return ".".join(names[:2]) if inside else names[0]


def imports() -> Iterator[tuple[str, str]]:
    """Yield pairs of packages, importer first, for every import of one package by another."""
    for path in sorted((ROOT / "hf_zero").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        own = package_of(module + ".__init__" if path.name == "__init__.py" and module.startswith("hf_zero.core.") else module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_zero"):
                found = [node.module or ""] if node.module != "hf_zero" else [f"hf_zero.{alias.name}" for alias in node.names]
                for other in map(package_of, found):
                    if own and other and other != own:
                        yield own, other


def order(pairs: set[tuple[str, str]]) -> list[str]:
    """Sort packages so that each comes after all packages that it imports, except in circles; alphabetically otherwise."""
    left = {name for pair in pairs for name in pair}
    sorted_names: list[str] = []
    while left:
        free = [name for name in left if not any(one == name and other in left for one, other in pairs)]
        fewest = min(left, key=lambda name: (sum(one == name and other in left for one, other in pairs), name))
        taken = sorted(free) or [fewest]
        sorted_names += taken
        left -= set(taken)
    return sorted_names


def draw(names: list[str], pairs: set[tuple[str, str]]) -> str:
    """Return the picture as SVG text."""
    size = CELL * len(names)
    width, height = LEFT + size + RIGHT, TOP + size + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, name in enumerate(names):
        middle = CELL * index + CELL // 2
        if index % 2 == 0:
            lines.append(f'<rect x="{LEFT}" y="{TOP + CELL * index}" width="{size}" height="{CELL}" fill="#f2f4f8"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{TOP + middle + 4}" text-anchor="end" fill="#1f2937">{name}</text>')
        turned = f'transform="rotate(-60 {LEFT + middle} {TOP - 8})"'
        lines.append(f'<text x="{LEFT + middle}" y="{TOP - 8}" fill="#1f2937" {turned}>{name}</text>')
        x, y = LEFT + CELL * index + 4, TOP + CELL * index + 4
        lines.append(f'<rect x="{x}" y="{y}" width="{CELL - 8}" height="{CELL - 8}" fill="#9ca3af"/>')
    for one, other in sorted(pairs):
        row, column = names.index(one), names.index(other)
        colour = "#2563eb" if column < row else "#dc2626"
        x, y = LEFT + CELL * column + CELL // 2, TOP + CELL * row + CELL // 2
        lines.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"><title>{one} imports {other}</title></circle>')
    legend = "A dot: the package of the row imports the package of the column. Grey squares stand for the packages themselves."
    lines.append(f'<text x="8" y="{height - 14}" fill="#4b5563">{legend}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Write the picture, or compare it with the code; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the picture that is there, write nothing")
    arguments = parser.parse_args()
    pairs = set(imports())
    picture = draw(order(pairs), pairs)
    if not arguments.check:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(picture, encoding="utf-8")
        return 0
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture:
        return 0
    print(f"{PICTURE.relative_to(ROOT)} does not fit the imports; draw it anew: python tools/house_map.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

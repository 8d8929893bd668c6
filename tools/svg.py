"""Write small SVG pictures that are readable on light and dark pages: each has its own background and follows the system's colour
scheme.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

# Colours that people with any kind of colour vision can distinguish (Okabe and Ito); on dark ground the same, lighter where needed.
COLOURS = {
    "parameters": ("#0072b2", "#56b4e9"),
    "gradients": ("#e69f00", "#e69f00"),
    "states": ("#009e73", "#2cc79b"),
    "activations": ("#b0578d", "#d58bb8"),
    "other": ("#9a9a9a", "#7c7c7c"),
    "ours": ("#0072b2", "#56b4e9"),
    "peer": ("#b3b3b3", "#6f7680"),
    "compute": ("#56b4e9", "#2f7fb5"),
    "gather": ("#009e73", "#2cc79b"),
    "reduce": ("#e69f00", "#e69f00"),
    "update": ("#b0578d", "#d58bb8"),
}


class Svg:
    """The shapes of one picture.

    Args:
        width: Pixels.
        height: Pixels.
        title: Title of the picture, for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str = "", hint: str = "") -> None:
        """Add a rectangle of the colour of ``kind`` ("empty": an outline), with ``text`` in its middle and ``hint`` as its tooltip."""
        inner = f"<title>{escape(hint)}</title>" if hint else ""
        shape = f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="2">{inner}</rect>'
        self._shapes.append(shape)
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", "inside")

    def text(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """Add a line of text; ``style`` is "", "head", "small" or "inside" (on a coloured box)."""
        self._shapes.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, style: str = "axis") -> None:
        """Add a line; ``style`` is "axis", "grid" or "limit"."""
        self._shapes.append(f'<line class="{style}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>')

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Add one row of colours with their meaning: kind -> text."""
        for kind, text in entries.items():
            self.box(x, y - 10, 12, 12, kind)
            self.text(x + 18, y, text)
            x += 36 + 7.4 * len(text)

    def write(self, path: Path) -> None:
        """Write the picture to ``path`` as SVG."""
        width, height = self.size
        fills = "".join(f".{name}{{fill:{light}}}" for name, (light, _) in COLOURS.items())
        dark = "".join(f".{name}{{fill:{shade}}}" for name, (_, shade) in COLOURS.items())
        style = (
            "text{font:13px system-ui,sans-serif;fill:#1b1f24}.head{font-weight:600;font-size:14px}.small{font-size:11.5px;fill:#57606a}"
            ".inside{fill:#fff;font-size:12px}.ground{fill:#fff;stroke:#d0d7de}.empty{fill:none;stroke:#8c959f;stroke-dasharray:3 2}"
            ".axis{stroke:#57606a}.grid{stroke:#d8dee4}.limit{stroke:#cf222e;stroke-width:1.5;stroke-dasharray:5 3}"
            f"{fills}@media (prefers-color-scheme:dark){{text{{fill:#e6edf3}}.small{{fill:#9ea7b3}}.inside{{fill:#0d1117}}"
            ".ground{fill:#161b22;stroke:#30363d}.empty{stroke:#6e7681}.axis{stroke:#9ea7b3}.grid{stroke:#30363d}.limit{stroke:#ff7b72}"
            f"{dark}}}"
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{style}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
            *self._shapes,
            "</svg>",
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ticks(most: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to at least ``most``, in about ``count`` steps."""
    raw = most / count
    scale = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 0.001
    while scale * 10 <= raw:
        scale *= 10
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw)
    found = [0.0]
    while found[-1] < most:
        found.append(found[-1] + step)
    return found

"""Pictures by matplotlib, which is there for who asks for one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.system import own_files


def is_page(path: Path) -> bool:
    """Whether the ending of ``path`` asks for a page to open in a browser, which needs no matplotlib."""
    return path.suffix.lower() in (".html", ".htm")


def require_place(path: Path, flag: str) -> None:
    """Refuses a picture that cannot be, before anything is computed for it.

    Args:
        path: Where it is to go.
        flag: Who asked for it, for the message.

    Raises:
        UnsupportedError: Without matplotlib.
        ConfigError: The folder of ``path`` is not there.
    """
    _require_matplotlib(flag)
    require_folder(path, flag)


def require_folder(path: Path, flag: str) -> None:
    """Refuses a file in a folder that is not there.

    Args:
        path: Where it is to go.
        flag: Who asked for it, for the message.

    Raises:
        ConfigError: The folder of ``path`` is not there.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: there is no folder {path.absolute().parent}")


def canvas(rows: int, size: tuple[float, float], flag: str, **layout: Any) -> tuple[Any, Any]:
    """An empty figure, and its axes (rows, 1); nothing of it is shown on a screen.

    Args:
        rows: Panels below each other.
        size: Inches.
        flag: Who asked for it, for the message.
        layout: Further arguments of ``pyplot.subplots``.

    Raises:
        UnsupportedError: Without matplotlib.
    """
    _require_matplotlib(flag)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, 1, figsize=size, layout="constrained", squeeze=False, **layout)


def save(figure: Any, path: Path, flag: str) -> None:
    """Writes a figure of ``canvas``, in the format that the ending of ``path`` names, and lets it go.

    Raises:
        ConfigError: ``path`` cannot be written, or has an ending that is no format.
    """
    from matplotlib import pyplot

    try:
        ending = path.suffix.removeprefix(".").lower() or "png"
        if ending not in figure.canvas.get_supported_filetypes():
            raise ValueError(
                f"the ending {path.suffix!r} is no format; known are {', '.join(sorted(figure.canvas.get_supported_filetypes()))}"
            )
        with own_files.replacing(path) as file:
            figure.savefig(file, format=ending)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _require_matplotlib(flag: str) -> None:
    if find_spec("matplotlib") is None:
        raise UnsupportedError(f"{flag} needs matplotlib: pip install matplotlib")

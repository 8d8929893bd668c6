"""Draw pictures with matplotlib, an optional dependency."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.system import own_files


def is_page(path: Path) -> bool:
    """Return whether the ending of ``path`` means a page for a browser, which needs no matplotlib."""
    return path.suffix.lower() in (".html", ".htm")


def require_place(path: Path, flag: str) -> None:
    """Raise if a picture cannot be written, before any work for it.

    Args:
        path: Path of the picture.
        flag: Command line flag that requested it, for the message.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ConfigError: The folder of ``path`` does not exist.
    """
    _require_matplotlib(flag)
    require_folder(path, flag)


def require_folder(path: Path, flag: str) -> None:
    """Raise if the folder of a file does not exist.

    Args:
        path: Path of the file.
        flag: Command line flag that requested it, for the message.

    Raises:
        ConfigError: The folder of ``path`` does not exist.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: there is no folder {path.absolute().parent}")


def canvas(rows: int, size: tuple[float, float], flag: str, **layout: Any) -> tuple[Any, Any]:
    """Return an empty figure, and its axes (rows, 1); it is not shown on a screen.

    Args:
        rows: Number of panels, one below the other.
        size: Width and height in inches.
        flag: Command line flag that requested it, for the message.
        layout: Further arguments of ``pyplot.subplots``.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    _require_matplotlib(flag)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, 1, figsize=size, layout="constrained", squeeze=False, **layout)


def save(figure: Any, path: Path, flag: str) -> None:
    """Write a figure of ``canvas``, in the format that the ending of ``path`` names, and free it.

    Raises:
        ConfigError: ``path`` cannot be written, or its ending is not the name of a format.
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

"""``TpPlan``: the splits of a model as plain data that can be printed, saved as JSON, edited and loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.system import own_files
from hf_zero.system.reading import read_json, reading

Ranges = list[list[tuple[int, int]]]  # per rank, half-open ranges of indices

WHOLE = "whole"
COLUMN, ROW, GATHERED, SCATTERED, VOCABULARY, INNER = "column", "row", "column, gathered", "row, scattered", "vocabulary", "inner"
SPLITS = (COLUMN, ROW, GATHERED, SCATTERED, VOCABULARY, INNER, WHOLE)
_FORMAT = 1


@dataclass
class SplitParameter:
    """Division of one parameter or buffer.

    Attributes:
        shape: Shape of the whole tensor.
        dim: The dimension that is divided.
        ranges: Per rank, its indices in that dimension, in the order of its tensor. Gradients of indices that several ranks hold are
            summands.
    """

    shape: list[int]
    dim: int
    ranges: Ranges


@dataclass
class Boundary:
    """Conversion of a tensor where it enters or leaves a module.

    Attributes:
        side: "in" or "out".
        key: Path of the tensor in the arguments or the result ("hidden_states", "0.1"); empty for the only tensor.
        kind: Name of the conversion; see ``solve.py`` and ``local_split.py``.
        dim: Dimension that is cut or joined.
        ranges: Per rank, its indices in that dimension; see ``SplitParameter``.
        full: Size of the whole dimension.
    """

    side: str
    key: str
    kind: str
    dim: int = -1
    ranges: Ranges = field(default_factory=list)
    full: int = 0


@dataclass
class ModulePlan:
    """One row of the plan's table: how a module is split, and why."""

    split: str
    reason: str = ""
    source: str = "inferred"


@dataclass
class TpPlan:
    """Plan for splitting a model over ``ranks``.

    Attributes:
        ranks: Size of a tensor-parallel group.
        source: Origin of the plan.
        modules: Rows of the table by path: linear and embedding layers, and other modules with divided parameters. Users may edit this
            part.
        parameters: Division of each divided parameter, by name.
        buffers: Division of each divided buffer, by name.
        summed: Names of parameters that every rank holds whole and whose gradients are summands.
        borders: Conversions at a module's boundary, by the module's path.
        rows: Paths of linear layers whose bias is added after the sum over ranks.
        attributes: By path: integer attributes of the module with their values on a part of the model.
        random: Paths of modules that draw random numbers for divided tensors; each rank draws its own.
        notes: Notes for the user.
    """

    ranks: int
    source: str = "inferred"
    modules: dict[str, ModulePlan] = field(default_factory=dict)
    parameters: dict[str, SplitParameter] = field(default_factory=dict)
    buffers: dict[str, SplitParameter] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    borders: dict[str, list[Boundary]] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    random: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with a digest that shows whether ``modules`` was edited."""
        data = asdict(self)
        return {"format": _FORMAT, "digest": _digest(data["modules"]), **data}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as JSON.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            own_files.write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"the plan cannot be written to {os.fspath(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TpPlan:
        """Read a plan from a JSON file; see ``from_dict``."""
        with reading(f"the tensor-parallel plan {path}", ConfigError):
            return cls.from_dict(read_json(Path(path), ConfigError), str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "plan") -> TpPlan:
        """Return a plan from plain data.

        Raises:
            ConfigError: ``data`` is no plan of this format, or a module's split is unknown.
        """
        if data.get("format") != _FORMAT:
            raise ConfigError(f"{where}: format is {data.get('format')!r}, {_FORMAT} is allowed")
        for path, entry in data["modules"].items():
            if entry.get("split") not in SPLITS:
                raise ConfigError(f"{where}: modules.{path}.split is {entry.get('split')!r}; {', '.join(map(repr, SPLITS))} are allowed")
        plan = cls(
            ranks=int(data["ranks"]),
            source=data["source"],
            modules={path: ModulePlan(**entry) for path, entry in data["modules"].items()},
            parameters={name: _split_parameter(entry) for name, entry in data["parameters"].items()},
            buffers={name: _split_parameter(entry) for name, entry in data["buffers"].items()},
            summed=list(data["summed"]),
            borders={
                path: [Boundary(**{**entry, "ranges": _ranges(entry["ranges"])}) for entry in found]
                for path, found in data["borders"].items()
            },
            rows=list(data["rows"]),
            attributes={path: dict(found) for path, found in data["attributes"].items()},
            random=list(data["random"]),
            notes=list(data["notes"]),
        )
        plan.edited = data.get("digest") != _digest(data["modules"])
        return plan

    edited = False  # ``modules`` was changed since the plan was made, so the other parts are out of date

    # -- table --------------------------------------------------------------------------------------------------------

    def table(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield rows (module, split, source, reason); equal rows of layers whose paths differ only in numbers are yielded once."""
        grouped: dict[tuple[str, str, str, str], int] = {}
        for path, entry in self.modules.items():
            grouped.setdefault((starred(path), entry.split, entry.source, entry.reason), 0)
        yield from grouped


def starred(path: str) -> str:
    """Return ``path`` with a star in place of each number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _ranges(found: Any) -> Ranges:
    return [[(int(start), int(stop)) for start, stop in part] for part in found]


def _split_parameter(entry: Mapping[str, Any]) -> SplitParameter:
    return SplitParameter(list(entry["shape"]), int(entry["dim"]), _ranges(entry["ranges"]))


def _digest(modules: Mapping[str, Any]) -> str:
    text = json.dumps({path: entry["split"] for path, entry in modules.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ranges_of(indices: list[int]) -> list[tuple[int, int]]:
    """Return ascending indices as half-open ranges."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found

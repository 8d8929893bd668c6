"""Divide the images and videos of a batch over the ranks that share its sequences.

[Note: images over ranks] Every rank of a group gets all pixels of the group's batch, as it gets all tokens. transformers encodes them in
two methods of the model, ``get_image_features`` and ``get_video_features``, whose results are in the order of the images. Each rank calls
such a method with a contiguous part of the images, and the results are joined: features are whole on every rank, as if each had encoded
all images, and backward sums the gradients of a feature over the ranks and sends them to the rank that has encoded it. A rank without an
image of its own encodes one and drops the result: all ranks run the same modules, so ZeRO's collectives stay in one order.

A call whose arguments do not tell which rows belong to which image is left whole: each rank then encodes all images. So are encoders
with batch normalization, whose statistics are those of all images.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_zero.core.units.unit import is_sharded
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.sequence_parallel.attention import SlicedAttention
from hf_zero.sequence_parallel.batches import is_medium
from hf_zero.sequence_parallel.joining import join

_METHODS = ("get_image_features", "get_video_features")
_LIBRARY = "transformers.models."
_FEATURES, _BY_LAYER = "pooler_output", "deepstack_features"  # fields of a result that models use
_MARK = "_hf_zero_divides_images"
Runs = list[tuple[int, int]]  # (first, end) of each rank

_divided: WeakKeyDictionary[nn.Module, DividedImages] = WeakKeyDictionary()


class DividedImages:
    """The calls of one model that encode images; each rank encodes a part of the images.

    Args:
        model: The model, whose classes are wrapped once; instances that are not divided behave as before.
        attention: State of the model's forwards over slices.
    """

    def __init__(self, model: nn.Module, attention: SlicedAttention) -> None:
        self._attention = attention
        self._collectives = attention.collectives
        self._inside = False
        self._owners = [module for module in model.modules() if _wrap_methods(type(module))]
        self._norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for owner in self._owners:
            _divided[owner] = self

    def remove(self) -> None:
        """Make every rank encode all images again."""
        for owner in self._owners:
            if _divided.get(owner) is self:
                _divided.pop(owner)

    def encode(self, method: Callable[..., Any], owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``method`` for all images; collective inside a forward over slices.

        Raises:
            StateError: The encoder has failed on another rank.
            UnsupportedError: The results of the ranks do not fit together.
        """
        attention = self._attention
        divides = attention.sliced and not (attention.outside or attention.alone or attention.inside_whole or self._inside)
        if not divides or self._collectives.pretended or any(norm.training for norm in self._norms):
            return method(owner, *args, **kwargs)
        given, others = _named(method, args, kwargs)
        parts = None if {**given, **others}.get("return_dict") is False else parts_of(given, self._collectives.world)
        if parts is None:
            return method(owner, *args, **kwargs)
        self._inside = True
        try:
            mine = {name: parts.cut(value, self._collectives.rank) for name, value in given.items()}
            result = method(owner, **mine, **others)
        except Exception as error:
            if not any(map(is_sharded, owner.parameters())):  # else the other ranks wait for parameters of the encoder
                self._collectives.gather_objects(f"{type(error).__name__}: {error}", "images")
            raise
        finally:
            self._inside = False
        return self._joined(result, f"{type(owner).__name__}.{method.__name__}", keeps=parts.keeps(self._collectives.rank))

    def _joined(self, result: Any, name: str, keeps: bool) -> Any:
        """Return the result for all images; other fields than features are None."""
        found = {key: result[key] for key in (_FEATURES, _BY_LAYER) if isinstance(result, dict) and result.get(key) is not None}
        leaves = [leaf for key, value in found.items() for leaf in (value if key == _BY_LAYER else [value])]
        mine = [_Described.of(leaf, keeps) for leaf in leaves]
        everyone: list[list[_Described]] = self._collectives.gather_objects(mine, "images")
        failed = next(((rank, text) for rank, text in enumerate(everyone) if isinstance(text, str)), None)
        if failed is not None:
            raise StateError(
                f"{name} failed for the images of rank {failed[0]} of the group that shares this batch: {failed[1]}. The other ranks have "
                "encoded their images; see the traceback of that rank"
            )
        first = everyone[0]
        if not first or any(len(other) != len(first) or not all(map(_Described.fits, first, other)) for other in everyone):
            shapes = [[str(described) for described in other] for other in everyone]
            raise UnsupportedError(
                f"sequence parallelism: the features that the ranks of a group got from {name} for their parts of the images do not fit "
                f"together: {shapes}. Give each batch images of one size, or remove sequence_parallel_size for this model"
            )
        joined = iter([self._join(leaf, [other[place] for other in everyone]) for place, leaf in enumerate(leaves)])
        values = {key: [next(joined) for _ in value] if key == _BY_LAYER else next(joined) for key, value in found.items()}
        return type(result)(**values)

    def _join(self, leaf: _Leaf, everyone: Sequence[_Described]) -> _Leaf:
        mine = everyone[self._collectives.rank]
        piece = leaf if isinstance(leaf, torch.Tensor) else torch.cat(list(leaf))
        most = max(sum(described.rows) for described in everyone)
        piece = piece[: sum(mine.rows)]
        padded = torch.cat([piece, piece.new_zeros(most - piece.shape[0], *piece.shape[1:])])
        whole = join(self._collectives, padded, 0).unflatten(0, (self._collectives.world, most))
        rows = torch.cat([whole[rank, : sum(described.rows)] for rank, described in enumerate(everyone)])
        if isinstance(leaf, torch.Tensor):
            return rows
        return type(leaf)(rows.split([count for described in everyone for count in described.rows]))


_Leaf = Any  # a tensor with rows of all images, or a list or tuple with a tensor for each image


@dataclass(frozen=True)
class _Described:
    """A leaf of one rank's result.

    Attributes:
        rows: Rows of each tensor; one number for a tensor of all images.
        per_image: Whether the leaf has a tensor for each image.
        shape: Shape of a row.
        dtype: Type of its elements.
    """

    rows: list[int]
    per_image: bool
    shape: list[int]
    dtype: str

    @classmethod
    def of(cls, leaf: _Leaf, keeps: bool) -> _Described:
        per_image = not isinstance(leaf, torch.Tensor)
        tensors = list(leaf) if per_image else [leaf]
        if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
            return cls([], per_image, [-1], type(leaf).__name__)
        shapes = [list(tensor.shape[1:]) for tensor in tensors]
        rows = [tensor.shape[0] for tensor in tensors] if keeps else [] if per_image else [0]
        alike = all(shape == shapes[0] for shape in shapes)
        return cls(rows, per_image, shapes[0] if shapes and alike else [-1], str(tensors[0].dtype) if tensors else "")

    def fits(self, other: _Described) -> bool:
        """Return whether rows of ``other`` may stand behind the own ones."""
        return -1 not in self.shape and (self.per_image, self.shape, self.dtype) == (other.per_image, other.shape, other.dtype)

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.shape} {self.dtype}"


# -- arguments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Division of the images of one call over ranks.

    Attributes:
        images: Numbers of the images that each rank encodes.
        rows: Rows of the pixels of these images.
        kept: Number of images of each rank whose features count; 0 for a rank that encodes an image of another rank.
        length: Rows of all pixels.
    """

    images: Runs
    rows: Runs
    kept: list[int]
    length: int

    def keeps(self, rank: int) -> bool:
        """Return whether the features that ``rank`` computes count."""
        return self.kept[rank] > 0

    def cut(self, value: Any, rank: int) -> Any:
        """Return the part of an argument that belongs to the images of ``rank``; an argument without images as it is."""
        size = _length(value)
        if size is None:
            return value
        first, end = self.rows[rank] if size == self.length else self.images[rank]
        return value[first:end]


def parts_of(given: dict[str, Any], ranks: int) -> Parts | None:
    """Divide the images of a call into contiguous parts with about the same number of rows.

    Args:
        given: Arguments by name. The first has the pixels: a row for each image, or, if another argument, whose name ends with
            ``grid_thw``, has the patches of each image along time, height and width, a row for each patch.
        ranks: Number of parts.

    Returns:
        The parts; None if there is one image, or if an argument has another length, so that its rows belong to unknown images.
    """
    length = _length(next(iter(given.values()), None))
    if length is None:
        return None
    grid = next((value for name, value in given.items() if name.endswith("grid_thw") and isinstance(value, torch.Tensor)), None)
    sizes = [1] * length if grid is None else grid.prod(-1).tolist()
    count = len(sizes)
    known = all(_length(value) in (None, length, count) for value in given.values())
    if not known or sum(sizes) != length or count < 2:
        return None
    starts = [0, *itertools.accumulate(sizes)]
    borders = [min(range(count + 1), key=lambda n: abs(starts[n] * ranks - length * rank)) for rank in range(ranks + 1)]
    kept = list(itertools.pairwise(borders))
    images = [(first, end) if first < end else (max(first - 1, 0), max(first, 1)) for first, end in kept]
    rows = [(starts[first], starts[end]) for first, end in images]
    return Parts(images, rows, [end - first for first, end in kept], length)


def _length(value: Any) -> int | None:
    """Return the length along dimension 0 of a tensor, or of a list of tensors; None for other arguments."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else None
    is_list = isinstance(value, (list, tuple)) and value and isinstance(value[0], (torch.Tensor, list, tuple))
    return len(value) if is_list else None


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a call by name: of images, in the order of the signature, and others, such as labels, that are passed on."""
    names = list(inspect.signature(method).parameters)[1:]
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: passed.pop(name) for name in [*names, *filter(is_medium, kwargs)] if name in passed}
    return given, passed


# -- classes ----------------------------------------------------------------------------------------------------------


def _wrap_methods(kind: type) -> bool:
    """Wrap the methods of a class of transformers that encode images, once; return whether it has any.

    Methods that return bare tensors, as in older versions of transformers, stay as they are: their structure is not declared.
    """
    found = False
    for name in _METHODS:
        method = getattr(kind, name, None)
        if not inspect.isfunction(method) or not method.__module__.startswith(_LIBRARY):
            continue
        if "Output" not in str(inspect.signature(method).return_annotation):
            continue
        found = True
        if not hasattr(method, _MARK):
            setattr(kind, name, _dispatching(method))
    return found


def _dispatching(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        divided = _divided.get(self)
        return method(self, *args, **kwargs) if divided is None else divided.encode(method, self, args, kwargs)

    setattr(call, _MARK, True)
    return call

"""Slices of batches: each rank of a group loads batches of its own, and the group trains on them one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import axis_over
from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once

IGNORED = -100  # label of tokens that no loss counts
_TOLD_BY_POSITIONS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)  # where packed samples begin; of padding-free collators
_FILL = {"labels": IGNORED, "shift_labels": IGNORED, "labels before the shift": IGNORED}

_TOKENS = ("input_ids", "inputs_embeds")
_PER_TOKEN = ("attention_mask", "position_ids", "labels", "shift_labels")
_MARKED = ("input_ids", "position_ids")  # whole numbers, which engines and Trainer never cast to another tensor
_MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features", "feature_attention_mask", "input_values", "second_per_grid")
LABELS = "labels before the shift"  # name in messages
_behind = WeakTensorKeyDictionary()  # shifted labels of slices: the slice of the labels that they were made of
_cut = WeakTensorKeyDictionary()  # tensors of the slices that adapters have given; whether they counted the positions

Batch = dict[str, Any]


def is_slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of a forward hold tokens or positions of a slice that an adapter has given."""
    given = (*args[:1], *(kwargs.get(name) for name in _MARKED))
    return any(isinstance(value, torch.Tensor) and value in _cut for value in given)


def counted_by_adapter(positions: torch.Tensor) -> bool | None:
    """Return whether an adapter has made these positions; False for positions of a batch, None for those that come from no adapter."""
    found: bool | None = _cut.get(positions)
    return found


def mark_slice(batch: Batch, counted: bool) -> None:
    """Record that the tokens and positions of ``batch`` are a slice; ``counted`` says that no batch had the positions."""
    _cut.update({batch[name]: counted for name in _MARKED if name in batch})


def copy_marks(given: Mapping[str, Any], copied: Mapping[str, Any]) -> None:
    """Copy the marks of tensors in ``given`` to tensors of the same names in ``copied``: a copy to a device is another tensor.

    A copy "to" ``cpu:0`` is one too, for tensors on the CPU have no index.
    """
    for name, value in given.items():
        other = copied.get(name)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and other is not value:
            for marks in (_cut, _behind):
                if value in marks:
                    marks[other] = marks[value]


def labels_behind(shifted: torch.Tensor | None) -> torch.Tensor | None:
    """Return the slice of a batch's own labels, from whose whole an adapter has made these; None for other tensors."""
    found: torch.Tensor | None = _behind.get(shifted) if shifted is not None else None
    return found


def cache_in(given: Mapping[str, Any]) -> Any:
    """Return the keys and values of earlier tokens among a forward's arguments; None without. transformers 5.24 named them ``cache``."""
    return next((given[name] for name in ("cache", "past_key_values") if given.get(name) is not None), None)


def is_medium(name: str) -> bool:
    """Return whether an argument of that name has images, sound, or facts about them: they have no dimension of tokens."""
    return name.startswith(_MEDIA)


@dataclass(frozen=True)
class _Told:
    """Report of a rank to its group about the batch it has loaded.

    Attributes:
        ended: Whether the loader had no further batch.
        last: Whether the loader declares this batch its last.
        counted: Whether ``position_ids`` were computed, because the batch had none.
        problem: Reason why the batch cannot be cut into slices; "" if it can.
        layout: (name, type, shape of one slice) of each tensor.
        rest: Values of the batch that are not tensors.
    """

    ended: bool
    last: bool
    counted: bool
    problem: str
    layout: list[tuple[str, str, list[int]]]
    rest: dict[str, Any]


class UlyssesSPDataLoaderAdapter:
    """Turn a loader of whole sequences, another batch on each rank, into one of slices. DeepSpeed's class, with its arguments.

    From each batch of the loader come as many steps as the group has ranks: in step ``r`` every rank has its slice of what rank ``r``
    has loaded. Sequences whose length the group does not divide get tokens at their end that no other token of a causal model attends
    to, with the label -100. A batch without ``position_ids`` gets those that models count with (0, 1, 2, ...); ``labels`` become
    ``shift_labels``, shifted by one before they are cut.

    Args:
        dl: Any loader of dictionaries of tensors (batch, tokens); other values reach every rank as they are.
        sp_rank: This rank's place in the group.
        sp_group: The sequence-parallel group.
        sp_world_size: Its size.
        device: Where the slices are put.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: dist.ProcessGroup, sp_world_size: int, device: torch.device | str) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self.collectives: Collectives = open_collectives(axis_over(sp_group, self.device))
        self._running: Iterator[Batch] | None = None
        # What libraries read of a loader that they make another of, as skip_first_batches does: that one then skips steps, of slices.
        self._stands_for: DataLoader[Batch] = DataLoader(SliceStream(self), batch_size=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_stands_for" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._stands_for, name)

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[Batch]:
        return self._slices()

    def __next__(self) -> Batch:
        if self._running is None:
            self._running = self._slices()
        try:
            return next(self._running)
        except StopIteration:
            self._running = None
            raise

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader behind, or its sampler."""
        for target in (self.dl, getattr(self.dl, "sampler", None)):
            tell = getattr(target, "set_epoch", None)
            if tell is not None:
                tell(epoch)
                return

    def _slices(self) -> Iterator[Batch]:
        loader = iter(self.dl)
        while True:
            loaded = next(loader, None)
            batches, at_end = self._exchange_batches(loaded)
            if not batches:
                self._end_early(loaded)
                return
            # accelerate ends an accumulation at the end of a loader, which is that of its last slice, on all ranks of the group.
            tells_end = hasattr(self.dl, "end_of_dataloader")
            while batches:
                if at_end and tells_end:
                    self.dl.end_of_dataloader = len(batches) == 1
                yield batches.popleft()

    def _end_early(self, left_over: Any) -> None:
        """End accelerate's loader if its last batch remains unused, so that accelerate does not treat the loader as active."""
        end = getattr(self.dl, "end", None)
        if left_over is not None and callable(end):
            end()

    def _exchange_batches(self, batch: Any) -> tuple[deque[Batch], bool]:
        """Return this rank's slices of the batches of all ranks of the group, in rank order, and whether they are the last; collective.

        There are none once a rank has none (None).
        """
        problem = ""
        parts: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {}
        try:
            if batch is not None:
                parts, rest = prepare(batch, self.sp_world_size)
        except ConfigError as error:
            problem = str(error)
        layout = [(name, str(part.dtype).removeprefix("torch."), list(part.shape[1:])) for name, part in parts.items()]
        last = bool(getattr(self.dl, "end_of_dataloader", False))
        counted = isinstance(batch, Mapping) and batch.get("position_ids") is None
        everyone: list[_Told] = self.collectives.gather_objects(_Told(batch is None, last, counted, problem, layout, rest), "batches")
        ended = sum(told.ended for told in everyone)
        if ended:
            if ended < len(everyone):
                warn_once(
                    "the data loaders of a sequence-parallel group have different lengths: the remaining batches of the longer ones "
                    "are not used"
                )
            return deque(), True
        problems = [told.problem for told in everyone if told.problem]
        if problems:
            raise ConfigError(problems[0])
        layouts = [[(name, getattr(torch, dtype), shape) for name, dtype, shape in told.layout] for told in everyone]
        received = self._exchange(parts, max(map(_nbytes, layouts)))
        batches: deque[Batch] = deque()
        for row, each, told in zip(received, layouts, everyone, strict=True):
            found = _unpack(row, each)
            labels = found.pop(LABELS, None)
            if labels is not None:
                _behind[found["shift_labels"]] = labels
            mark_slice(found, told.counted)
            batches.append({**found, **told.rest})
        return batches, any(told.last for told in everyone)

    def _exchange(self, parts: dict[str, torch.Tensor], nbytes: int) -> torch.Tensor:
        """Return one row of ``nbytes`` bytes from every rank: this rank's slices of the parts there; collective."""
        message = torch.zeros(self.sp_world_size, nbytes, dtype=torch.uint8, device=self.device)
        start = 0
        for part in parts.values():
            values = part.contiguous().view(self.sp_world_size, -1).view(torch.uint8)
            message[:, start : start + values.shape[1]].copy_(values)
            start += values.shape[1]
        return self.collectives.exchange(message, "batches").received()


class SliceStream(IterableDataset[Batch]):
    """The steps of an adapter as a dataset."""

    def __init__(self, adapter: UlyssesSPDataLoaderAdapter) -> None:
        self._adapter = adapter

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._adapter)

    def __len__(self) -> int:
        return len(self._adapter)


def prepare(batch: Any, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a batch with the tensors that slices need, cut: (ranks, batch, slice, ...); and the values that are no tensors.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` and whatever else the model takes, tensors (batch, tokens, ...).
        ranks: Number of slices.

    Raises:
        ConfigError: The batch is no dictionary, or something in it has no dimension of tokens, or requires a gradient.
    """
    tensors, rest, _ = whole_batch(batch, ranks)
    needs = [name for name, value in tensors.items() if value.requires_grad]
    if needs:
        raise ConfigError(
            f"sequence parallelism: {', '.join(needs)} of a batch requires a gradient, which slices cannot send back to the rank that "
            "loaded it. Load input_ids, and let the model embed them; or detach() the tensor, if it is not trained"
        )
    # Media are whole on every rank: which tokens are an image's is the model's to know.
    return {
        name: value.expand(ranks, *value.shape) if is_medium(name) else value.unflatten(1, (ranks, -1)).transpose(0, 1)
        for name, value in tensors.items()
    }, rest


def whole_batch(batch: Any, multiple: int, shifts: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """Return a batch with the tensors that slices need, (batch, tokens, ...), still whole; the values that are no tensors; and the tokens
    that were added at the end. Arguments and errors as ``prepare``.

    Args:
        batch: As for ``prepare``.
        multiple: Number that the tokens become a multiple of.
        shifts: ``labels`` become ``shift_labels``; False leaves them, for models whose loss shifts nothing.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(f"sequence parallelism: a batch must be a dictionary with input_ids; the loader gives {type(batch).__name__}")
    batch = dict(batch)
    first = next((batch[name] for name in _TOKENS if batch.get(name) is not None), None)
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        raise ConfigError(f"sequence parallelism: a batch needs input_ids (batch, tokens) to be divided; this one has {sorted(batch)}")
    rows, length = first.shape[:2]
    for name in _PER_TOKEN:
        if batch.get(name) is not None and not isinstance(batch[name], torch.Tensor):
            raise ConfigError(
                f"sequence parallelism: {name} of a batch is of type {type(batch[name]).__name__}; a tensor (batch, tokens) is needed"
            )
    if batch.get("position_ids") is not None:
        batch = {name: value for name, value in batch.items() if name not in _TOLD_BY_POSITIONS}
    else:
        batch["position_ids"] = torch.arange(length, device=first.device).expand(rows, -1)
    labels = batch.pop("labels", None) if shifts else None
    if labels is not None and batch.get("shift_labels") is None:
        _require_tokens("labels", labels, rows, length)
        batch[LABELS] = labels
        ahead = (0, 0) * (labels.dim() - 2) + (0, 1)
        batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], ahead, value=IGNORED)
    extra = -length % multiple
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        if is_medium(name):
            continue
        _require_tokens(name, value, rows, length)
        every = value.expand(rows, *value.shape[1:]) if value.shape[0] == 1 else value
        tensors[name] = _padded(name, every, extra)
    return tensors, {name: value for name, value in batch.items() if name not in tensors}, extra


def _require_tokens(name: str, value: torch.Tensor, rows: int, length: int) -> None:
    shape = tuple(value.shape)
    few = (
        1,
        rows,
        *((shape[0],) if value.dim() > 2 and rows % max(shape[0], 1) == 0 and "labels" in name else ()),
    )  # rows of one codebook each
    if value.dim() < 2 or shape[0] not in few or shape[1] != length:
        raise ConfigError(
            f"sequence parallelism: {name} of a batch has shape {shape}, and input_ids has {rows} rows of {length} tokens: tensors are cut "
            "along their second dimension, which must be that of the tokens (a mask (batch, tokens) has it, one of four dimensions has not)"
        )


def _padded(name: str, value: torch.Tensor, extra: int) -> torch.Tensor:
    """Return ``value`` with ``extra`` more tokens at the end; positions continue, so that the padding does not look like another
    sequence.
    """
    if not extra:
        return value
    if name == "position_ids":
        more = value[:, -1:] + torch.arange(1, extra + 1, device=value.device)
    else:
        more = torch.full((value.shape[0], extra, *value.shape[2:]), _FILL.get(name, 0), dtype=value.dtype, device=value.device)
    return torch.cat([value, more.to(value.dtype)], dim=1)


def _nbytes(layout: list[tuple[str, torch.dtype, list[int]]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in layout)


def _unpack(row: torch.Tensor, layout: list[tuple[str, torch.dtype, list[int]]]) -> Batch:
    """Return the tensors of one rank's message, by name."""
    batch, start = {}, 0
    for name, dtype, shape in layout:
        size = torch.Size(shape).numel() * dtype.itemsize
        batch[name] = row[start : start + size].clone().view(dtype).view(shape)  # a copy begins where its type may
        start += size
    return batch

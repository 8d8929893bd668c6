"""Count the reads of safetensors files: every tensor and every slice taken out of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import modeling_utils

Reads = dict[str, int]
"""Bytes by name of the tensor."""


class _Slice:
    def __init__(self, name: str, inner: Any, reads: Reads) -> None:
        self._name, self._inner, self._reads = name, inner, reads

    def __getitem__(self, index: Any) -> torch.Tensor:
        value: torch.Tensor = self._inner[index]
        self._reads[self._name] = self._reads.get(self._name, 0) + value.nbytes
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _File:
    def __init__(self, inner: Any, reads: Reads) -> None:
        self._inner, self._reads = inner, reads

    def __enter__(self) -> _File:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def keys(self) -> Any:
        return self._inner.keys()

    def metadata(self) -> Any:
        return self._inner.metadata()

    def get_slice(self, name: str) -> _Slice:
        return _Slice(name, self._inner.get_slice(name), self._reads)

    def get_tensor(self, name: str) -> Any:
        return self.get_slice(name)[...]


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Yield a mapping that counts this process's reads of safetensors files inside the context."""
    reads: Reads = {}
    real = safetensors.safe_open

    def safe_open(*args: Any, **kwargs: Any) -> _File:
        return _File(real(*args, **kwargs), reads)

    safetensors.safe_open = modeling_utils.safe_open = safe_open  # type: ignore[assignment,misc]
    try:
        yield reads
    finally:
        safetensors.safe_open = modeling_utils.safe_open = real  # type: ignore[misc]


def saved_sizes(model: Any, folder: Path) -> Reads:
    """Write ``model`` into several small files; return the bytes of every tensor in them."""
    model.save_pretrained(folder, max_shard_size="20KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    found = {}
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            found.update({key: opened.get_tensor(key).nbytes for key in opened.keys()})  # noqa: SIM118  # not a dict
    return found


def loaded_under(settings: dict[str, Any], model_class: Any, folder: str | None, **arguments: Any) -> tuple[Any, Reads]:
    """Return the result of ``from_pretrained`` while ``settings`` are the configuration in use, and its reads."""
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    holder = HfDeepSpeedConfig(settings)
    with counted_reads() as reads:
        model = model_class.from_pretrained(folder, **arguments)
    unset_hf_deepspeed_config()
    del holder
    return model, reads

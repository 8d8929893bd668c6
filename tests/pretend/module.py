"""``torch.pretend``: what ``torch.cuda`` is for CUDA, as far as libraries ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests import pretend

_AMP = [torch.bfloat16, torch.float16]


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    """A new stream of a device."""
    return torch.Stream(_device(device), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """An event; it belongs to the device of the stream on which it is recorded first."""
    return torch.Event(device=pretend.NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class device:
    """Makes a pretend device the current one inside ``with``."""

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None else _device(device).index

    def __enter__(self) -> None:
        self._before = current_device()
        if self.index >= 0:
            set_device(self.index)

    def __exit__(self, *_error: object) -> None:
        set_device(self._before)


@contextmanager
def stream(wanted: torch.Stream | None) -> Iterator[None]:
    """Operations inside go to ``wanted``; None changes nothing."""
    if wanted is None:
        yield
        return
    device_before = current_device()
    before = current_stream(wanted.device)
    torch.accelerator.set_stream(wanted)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        set_device(device_before)


def _device(value: Any) -> torch.device:
    if value is None:
        return torch.device(pretend.NAME, current_device())
    if isinstance(value, int):
        return torch.device(pretend.NAME, value)
    wanted = torch.device(value)
    return wanted if wanted.index is not None else torch.device(pretend.NAME, current_device())


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return torch._C._accelerator_hooks_device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_device(device).index)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_device(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_device(device).index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


def set_stream(wanted: torch.Stream) -> None:
    torch.accelerator.set_stream(wanted)


def get_device_name(device: Any = None) -> str:
    return f"Pretend accelerator {_device(device).index}"


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return _AMP


# Random numbers.


def _generator(device: Any = None) -> torch.Generator:
    return default_generators[_device(device).index]


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


# Memory.


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_device(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_device(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_device(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(_device(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_device(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_device(device))


def reset_accumulated_memory_stats(device: Any = None) -> None: ...


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_device(device))


def empty_cache() -> None:
    pretend.library().pretend_empty_cache()


class _Properties:
    """Of a device."""

    def __init__(self, index: int) -> None:
        self.name, self.total_memory = get_device_name(index), mem_get_info(index)[1]


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties(_device(device).index)


class _Runtime:
    """The two functions of CUDA's run-time library that lock pages."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, _flags: int) -> int:
        return pretend.library().pretend_register(address, nbytes)

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return pretend.library().pretend_unregister(address)


def cudart() -> type[_Runtime]:
    return _Runtime


default_generators = tuple(torch.ops.pretend.default_generator(index) for index in range(device_count()))

"""Implement `deepspeed.accelerator`: an object with DeepSpeed's interface for the device of this PyTorch, CPUs included."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from typing import Any

import torch

from hf_zero.comm.bootstrap import default_backend
from hf_zero.comm.process_groups import default_device
from hf_zero.deepspeed.alias.finder import RefusedAttributeError
from hf_zero.deepspeed.served.builders import BUILDERS, OpBuilder

# Functions that torch.cuda, torch.xpu, torch.npu and others share; taken from the module of the current device type.
_DEVICE_FUNCTIONS = frozenset(
    (
        "Event",
        "Stream",
        "current_stream",
        "default_stream",
        "empty_cache",
        "get_device_properties",
        "get_rng_state",
        "initial_seed",
        "manual_seed",
        "manual_seed_all",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_peak_memory_stats",
        "set_rng_state",
        "stream",
    )
)


class TorchAccelerator:
    """DeepSpeed's accelerator object, implemented with PyTorch; on a CPU, memory is the resident set of this process.

    It has all methods of DeepSpeed's object, because programs call all of them.
    """

    def device_name(self, device_index: int | str | None = None) -> str:
        """Return the device's name for ``device=``: ``"cuda"``, ``"cuda:1"``, ``"cpu"``."""
        kind = default_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return the current device as object, or a context manager that selects ``device_index``."""
        return (
            torch.device(self.device_name(device_index))
            if device_index is None or self._is_cpu
            else torch.accelerator.device_index(device_index)
        )

    def current_device(self) -> int:
        """Return the index of the current device; 0 on a CPU."""
        return 0 if self._is_cpu else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the name of the current device, ``"cuda:0"`` for example."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Select the device of this process; does nothing on a CPU."""
        if not self._is_cpu:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Return the number of devices; on a CPU the value of the variable ``LOCAL_SIZE``, as in DeepSpeed, otherwise 1."""
        if not self._is_cpu:
            return torch.accelerator.device_count()
        ranks = os.environ.get("LOCAL_SIZE", "")
        return max(1, int(ranks)) if ranks.isdecimal() else 1

    def is_available(self) -> bool:
        """Return True: there is always a device, at least the CPU."""
        return True

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this device (``"nccl"``, ``"gloo"`` ...)."""
        return default_backend()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the queued work of the device; does nothing on a CPU."""
        if not self._is_cpu:
            torch.accelerator.synchronize(device_index)

    def is_bf16_supported(self) -> bool:
        """Return whether bf16 arithmetic works on the device."""
        check = getattr(self._module, "is_bf16_supported", None)
        return True if check is None else bool(check())

    def is_fp16_supported(self) -> bool:
        """Return whether the device itself computes in fp16. Other CPUs train in fp16 through fp32, slowly."""
        if not self._is_cpu:
            return True
        has = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)  # missing in some builds of torch
        return has is not None and bool(has())

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that the device computes in natively."""
        halves = {torch.bfloat16: self.is_bf16_supported(), torch.float16: self.is_fp16_supported()}
        return [torch.float32, *(dtype for dtype, supported in halves.items() if supported)]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the device, or of the machine on a CPU."""
        if self._is_cpu:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._module.get_device_properties(self.current_device() if device_index is None else device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of free memory of the device, or of the machine on a CPU."""
        if self._is_cpu:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.total_memory(device_index) - int(self._module.memory_allocated(device_index))

    def random(self) -> Any:
        """Return the module of random-number functions."""
        return torch.random

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a page-locked copy of a host tensor if that speeds up transfers, otherwise the tensor itself."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor is page-locked."""
        return bool(not self._is_cpu and tensor.is_pinned())

    def is_fp64_supported(self) -> bool:
        """Return whether the device supports float64 tensors."""
        return default_device().type != "mps"

    def is_triton_supported(self) -> bool:
        """Return whether Triton compiles for this device."""
        return default_device().type in ("cuda", "xpu")

    def is_synchronized_device(self) -> bool:
        """Return whether operations are complete when their call returns; True on a CPU only."""
        return self._is_cpu

    def use_host_timers(self) -> bool:
        """Return the same as ``is_synchronized_device``."""
        return self._is_cpu

    def resolves_data_dependency(self) -> bool:
        """Return the same as ``is_synchronized_device``."""
        return self._is_cpu

    def handles_memory_backpressure(self) -> bool:
        """Return the same as ``is_synchronized_device``."""
        return self._is_cpu

    def memory_cached(self, device_index: int | None = None) -> int:
        """Return the same as ``memory_reserved``, under torch's old name."""
        return int(self.memory_reserved(device_index))

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Return the same as ``max_memory_reserved``, under torch's old name."""
        return int(self.max_memory_reserved(device_index))

    def range_push(self, msg: str) -> None:
        """Begin a range in NVIDIA's profiler; does nothing without CUDA."""
        if default_device().type == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """End the range that ``range_push`` has begun."""
        if default_device().type == "cuda":
            torch.cuda.nvtx.range_pop()

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """Return a new operator builder of the class ``class_name``; None if there is no such class."""
        builder = BUILDERS.get(class_name)
        return builder() if builder is not None else None

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """Return the class of an operator builder by name; None if there is no such class."""
        return BUILDERS.get(class_name)

    def get_compile_backend(self) -> str:
        """Return the name of the ``torch.compile`` backend for this device."""
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        """Return the names of the environment variables that select the devices of a process."""
        return {"cuda": ["CUDA_VISIBLE_DEVICES"], "xpu": ["ZE_AFFINITY_MASK"], "cpu": ["CPU_VISIBLE_DEVICES"]}.get(
            default_device().type, []
        )

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on a device of this kind."""
        return tensor.device.type == default_device().type

    def __getattr__(self, name: str) -> Any:
        """Return a function of torch's device module by its name.

        Raises:
            RefusedAttributeError: The name is a method of DeepSpeed's accelerator that hf_zero does not support.
        """
        if name.startswith("__") or name == "_name":
            raise AttributeError(name)
        if name in _TENSOR_TYPES:
            return partial(torch.tensor, dtype=_TENSOR_TYPES[name], device=self.current_device_name())
        if name in _DEVICE_FUNCTIONS:
            if self._is_cpu and name in _CPU_FUNCTIONS:
                return _CPU_FUNCTIONS[name]
            return getattr(self._module, name)
        raise RefusedAttributeError(
            f"get_accelerator().{name} is not provided by hf_zero; call torch.accelerator or torch.{self.device_name()}"
        )

    @property
    def _is_cpu(self) -> bool:
        return default_device().type == "cpu"

    @property
    def _module(self) -> Any:
        return torch.get_device_module(default_device())


def _resident_bytes(device_index: int | None = None) -> int:
    """Return the bytes of resident memory of this process now (the peak, if the system reports nothing else)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _peak_resident_bytes()


def _peak_resident_bytes(device_index: int | None = None) -> int:
    """Return the peak number of bytes of resident memory of this process."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _nothing_to_do(device_index: int | None = None) -> None:
    """Do nothing: a CPU has no caching allocator, and its peak cannot be reset."""


_CPU_FUNCTIONS: dict[str, Any] = {
    "empty_cache": _nothing_to_do,
    "reset_peak_memory_stats": _nothing_to_do,
    "memory_allocated": _resident_bytes,
    "memory_reserved": _resident_bytes,
    "max_memory_allocated": _peak_resident_bytes,
    "max_memory_reserved": _peak_resident_bytes,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device_index=None: torch.set_rng_state(state),
}


_TENSOR_TYPES: dict[str, torch.dtype] = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
"""Constructors of tensors on the device, from values."""


@lru_cache(maxsize=1)
def get_accelerator() -> TorchAccelerator:
    """Return the accelerator object of this process."""
    return TorchAccelerator()


def is_current_accelerator_supported() -> bool:
    """Return True: hf_zero trains on every device that this PyTorch drives."""
    return True

"""Run a script of the experiments, and add memory per rank and the kind of launch to its own measurements. For `compare.py`.

    accelerate launch ... benchmarks/experiments/measured.py examples/clm/run_clm_no_trainer.py --output_dir runs/zero3 ...

The script runs unchanged, with an Accelerator that adds its measurements to the script's results.json at the end. With WHOLE_INIT=1 in the
environment, random weights are drawn as without ZeRO: at stage 3 transformers draws different ones, because it constructs the model in
shards.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters of the whole model, tied ones once; under ZeRO-3 the whole sizes are in ``ds_numel``."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def expected_state_bytes(numel: int, *, stage: int | None, ranks: int, sixteen_bit: bool) -> int:
    """Compute the bytes of parameters and AdamW state that each rank keeps between two steps, without gradients and padding.

    Args:
        numel: Number of parameters of the model.
        stage: ZeRO stage 0 to 3; None for DDP or a single process.
        ranks: Number of data-parallel ranks.
        sixteen_bit: ZeRO keeps 16-bit parameters beside fp32 masters. DDP keeps fp32 parameters in any case.

    Returns:
        Bytes per rank, rounded up.
    """
    # fp32: 4 for the parameter, which is its own master, and 4 + 4 for AdamW's moments; 16-bit: 2, and 4 + 4 + 4.
    parameter_bytes, optimizer_bytes = (2, 12) if sixteen_bit and stage is not None else (4, 8)
    stage = stage or 0
    optimizer_share = ranks if stage >= 1 else 1
    parameter_share = ranks if stage >= 3 else 1
    return -(-numel * parameter_bytes // parameter_share) + -(-numel * optimizer_bytes // optimizer_share)


def _state_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield tensors with model state on this rank: parameters, shards, masters, optimizer state; maybe some of them twice."""
    yield from model.parameters()
    for unit in getattr(model, "units", ()):
        yield from (tensor for tensor in (unit.shard, unit.master) if tensor is not None)
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in inner.param_groups:
        yield from group["params"]
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def measured_state_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """Return the bytes of memory of this rank's parameters, masters and optimizer state, each block of memory once.

    Args:
        model: Result of `Accelerator.prepare`: an engine with ``units``, a DDP wrapper or the plain module.
        optimizer: The prepared optimizer. AdamW creates its state in the first step.
    """
    sizes: dict[tuple[str, int], int] = {}
    for tensor in _state_tensors(model, optimizer):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sizes[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest memory use so far: of the device's allocator, or on CPU of the whole process (resident set)."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return torch.get_device_module(device).max_memory_allocated(device)


class MeasuredAccelerator(accelerate.Accelerator):
    """Accelerate's Accelerator, which also writes ``measured`` into results.json when the script frees the objects that it has trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.state.deepspeed_plugin is not None and os.environ.get("WHOLE_INIT") == "1":
            transformers.integrations.deepspeed.unset_hf_deepspeed_config()

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare like Accelerate's; register the configuration again, which shards a model during its construction, as the model is
        built.
        """
        plugin = self.state.deepspeed_plugin
        if plugin is not None:
            transformers.integrations.deepspeed.set_hf_deepspeed_config(plugin.dschf)
        prepared = super().prepare(*args, **kwargs)
        self.measured_objects = prepared[:2]
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Measure, and free the objects; collective."""
        model, optimizer = self.measured_objects
        sizes = [peak_memory_bytes(self.device), measured_state_bytes(model, optimizer)]
        peak, state = self.gather(torch.tensor([sizes], device=self.device)).amax(dim=0).tolist()
        plugin = self.state.deepspeed_plugin
        config = {} if plugin is None else plugin.deepspeed_config
        on = [name for name in ("bf16", "fp16") if str((config.get(name) or {}).get("enabled")).lower() == "true"]
        found = {
            "stage": None if plugin is None else int((config.get("zero_optimization") or {}).get("stage", 0)),
            "ranks": self.num_processes,
            "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else "none",
            "device": self.device.type,
            "precision": on[0] if on else "fp32" if self.mixed_precision == "no" else self.mixed_precision,
            "parameters": count_parameters(model),
            "peak_memory_bytes": peak,
            "state_bytes": state,
        }
        path = Path(sys.argv[sys.argv.index("--output_dir") + 1], "results.json")
        if self.is_main_process:
            results = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps(results | {"measured": found}, indent=1) + "\n", encoding="utf-8")
        del model, optimizer, self.measured_objects
        return super().free_memory(*objects)


def main() -> None:
    """Run the script that the command line names like Python does, with the script's folder first on the module path."""
    script = Path(sys.argv[1]).resolve()
    sys.argv[:2] = [str(script)]
    sys.path[0] = str(script.parent)
    accelerate.Accelerator = MeasuredAccelerator
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

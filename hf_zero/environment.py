"""Describe the installed packages, the devices and the environment variables, as the text that users paste into bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping

from hf_zero.system.secrets import MASK, is_secret, without_credentials
from hf_zero.system.sizes import size_text

Facts = dict[str, dict[str, str]]

LIBRARIES = (
    "accelerate", "transformers", "peft", "trl", "lightning", "datasets", "tokenizers", "safetensors", "numpy", "pydantic", "triton",
    "tensorboard", "wandb", "comet_ml", "mpi4py",
)  # fmt: skip

VARIABLE_PREFIXES = ("ACCELERATE_", "HF_ZERO", "CUDA_VISIBLE_DEVICES", "NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "OMP_NUM_THREADS", "DS_")
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTORCH_CUDA_ALLOC_CONF")


def environment_facts(environ: Mapping[str, str] | None = None) -> Facts:
    """Return facts about this machine and process: group -> name -> text. Starts no process group and allocates no device memory.

    Args:
        environ: Environment variables to report; None reads those of the process.
    """
    return {
        "hf_zero": _package_facts(),
        "torch": _torch_facts(),
        "devices": _device_facts(),
        "native kernels": _kernel_facts(),
        "deepspeed": _deepspeed_facts(),
        "libraries": {name: version for name in LIBRARIES if (version := installed_version(name))},
        "variables": _variables(os.environ if environ is None else environ),
    }


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package_facts() -> dict[str, str]:
    version = installed_version("hf_zero") or "not installed (run from its source folder)"
    return {"version": version, "python": f"{platform.python_version()} ({sys.executable})", "system": platform.platform()}


def _torch_facts() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    backends = []
    if dist.is_available():
        known = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
        backends = [name for name, available in known.items() if available()]
        if getattr(dist, "is_xccl_available", lambda: False)():
            backends.append("xccl")
    return {
        "version": torch.__version__,
        "built for": built_for,
        "distributed backends": ", ".join(backends) or "none",
        "threads": str(torch.get_num_threads()),
    }


def _device_facts() -> dict[str, str]:
    import torch

    facts = {"cpu": f"{os.cpu_count()} cores, {platform.machine()}"}
    memory = _host_memory_bytes()
    if memory:
        facts["host memory"] = size_text(memory, ".1f", "GiB")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        facts["accelerator"] = "none"
        return facts
    properties = getattr(torch.get_device_module(accelerator), "get_device_properties", None)
    for index in range(torch.accelerator.device_count()):
        device = properties(index) if properties is not None else None
        text = f"{device.name}, {size_text(device.total_memory, '.1f', 'GiB')}" if device is not None else "properties unknown"
        facts[f"{accelerator.type}:{index}"] = text
    return facts


def _kernel_facts() -> dict[str, str]:
    from hf_zero.native.library import library, status

    found = status()
    if not found.isa:
        return {"used": "no; the reference implementation in torch is used", "reason": found.reason}
    loaded = library()
    supported = ", ".join(loaded.supported) if loaded else ""
    return {"used": found.isa, "runs here": supported, "library": found.path}


def _host_memory_bytes() -> int:
    """Return the bytes of physical memory of the machine; 0 if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def provider_of_deepspeed() -> str:
    """Return what ``import deepspeed`` would import: "hf_zero", "DeepSpeed" or "nothing"."""
    from hf_zero.deepspeed.alias.finder import alias_is_active, real_deepspeed_importable

    return "hf_zero" if alias_is_active() else "DeepSpeed" if real_deepspeed_importable() else "nothing"


def _deepspeed_facts() -> dict[str, str]:
    from hf_zero.deepspeed.alias.finder import real_deepspeed_importable

    facts = {
        "real DeepSpeed installed": "yes" if real_deepspeed_importable() else "no",
        "`import deepspeed` is": provider_of_deepspeed(),
    }
    version = installed_version("deepspeed")
    if version:
        facts["version it reports"] = version
    facts["the command `deepspeed`"] = _deepspeed_command()
    return facts


def _deepspeed_command() -> str:
    """Return the path of the command, or advice if it is missing: both packages install it, so uninstalling one of them removes it."""
    folders = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return shutil.which("deepspeed", path=folders) or (
        "missing: use `hf-zero launch`, or reinstall hf_zero or deepspeed (pip install --force-reinstall --no-deps)"
    )


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect a run, sorted by name; secrets are masked, and then long values are shortened."""
    found = {name: value for name, value in environ.items() if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)}
    shown = {name: MASK if is_secret(name) else without_credentials(value) for name, value in sorted(found.items())}
    return {name: value if len(value) <= 100 else value[:97] + "..." for name, value in shown.items()}


def as_text(facts: Facts) -> str:
    """Return ``facts`` as text: one heading per group, one aligned line per fact."""
    lines = []
    for group, entries in facts.items():
        lines.append(f"{group}:")
        width = max((len(name) for name in entries), default=0)
        lines += [f"  {name:<{width}}  {value}" for name, value in entries.items()] or ["  none"]
    return "\n".join(lines)


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report, as ``ds_report`` does; the arguments have no effect, because hf_zero has no operators to compile."""
    print(as_text(environment_facts()))


cli_main = main

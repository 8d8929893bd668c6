"""Write ``ds.json`` and a configuration of ``accelerate launch`` that refers to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.config.mesh import requested_context, requested_slices
from hf_zero.errors import ConfigError
from hf_zero.plan.inputs import Cluster
from hf_zero.system import own_files

_ACTIVATIONS = {
    (True, False): (
        "recomputes activations",
        "gradient_checkpointing=True of the training arguments, or model.gradient_checkpointing_enable()",
    ),
    (False, True): (
        "keeps activations on the host",
        "torch.autograd.graph.save_on_cpu() around the forward, or activation_offloading of TRL",
    ),
    (True, True): (
        "recomputes activations, with the inputs of layers on the host",
        'gradient_checkpointing=True and gradient_checkpointing_kwargs={"offload": True} of the training arguments',
    ),
}


def places(folder: Path) -> tuple[Path, Path]:
    """Return the paths of ``ds.json`` and ``accelerate.yaml`` in ``folder``.

    Raises:
        ConfigError: One of the files exists; it may belong to another run.
    """
    files = folder.absolute() / "ds.json", folder.absolute() / "accelerate.yaml"
    for file in files:
        if os.path.lexists(file):
            raise ConfigError(f"{file} exists already; name another folder, or move the file away")
    return files


def write_files(folder: Path, config: Mapping[str, Any], launcher: Mapping[str, Any] | None, remark: str = "") -> list[Path]:
    """Write ``config`` to ``ds.json`` and ``launcher`` to ``accelerate.yaml``, and return the paths of the written files.

    Args:
        folder: Folder of the files; created if it does not exist.
        config: The DeepSpeed configuration.
        launcher: The configuration of ``accelerate launch``; None writes only ``ds.json``.
        remark: Comment lines for the top of ``accelerate.yaml``.

    Raises:
        ConfigError: The folder cannot be written, or one of the files exists.
    """
    import yaml

    file, starter = places(folder)
    texts = {file: json.dumps(config, indent=2) + "\n"}
    if launcher is not None:
        texts[starter] = remark + yaml.safe_dump(dict(launcher), sort_keys=False)
    try:
        own_files.make_folders(folder)
        for path, text in texts.items():
            own_files.write_new_text(path, text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return list(texts)


def _slices_of_loaders(config: Mapping[str, Any]) -> int:
    """Return the ``sp_size`` that accelerate needs to cut the batches of a configuration; 0 where nothing cuts them, or the engine does."""
    slices = requested_slices(config)
    return slices if slices > 1 and requested_context(config) == 1 else 0


def _switch_of(recomputes: int, moves: bool) -> tuple[str, str]:
    """Return in words how a plan treats activations, and the switch of the script for it; empty texts if it keeps all of them."""
    if recomputes <= 1:
        return _ACTIVATIONS.get((bool(recomputes), moves), ("", ""))
    by = f'gradient_checkpointing=True and gradient_checkpointing_kwargs={{"every_n_layers": {recomputes}}} of the training arguments'
    does = f"recomputes the activations of 1 in {recomputes} blocks"
    return (f"{does}, with those of the others on the host", f"{by}, and {_ACTIVATIONS[False, True][1]}") if moves else (does, by)


def write(folder: Path, config: Mapping[str, Any], cluster: Cluster, recomputes: int, moves: bool = False) -> list[str]:
    """Write a planned configuration and its launcher file, and return lines that tell the user how to start it.

    Args:
        folder: Folder of the files; created if it does not exist.
        config: The DeepSpeed configuration.
        cluster: Number and place of the ranks.
        recomputes: Every how many blocks the plan recomputes one, which the script must enable; 0 recomputes none.
        moves: Whether the plan offloads activations to the host, which the script must enable.

    Raises:
        ConfigError: The folder cannot be written, or one of the files exists.
    """
    file, launcher = places(folder)
    nodes = -(-cluster.ranks // cluster.ranks_per_node)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": str(file),
            "zero3_init_flag": config["zero_optimization"]["stage"] == 3,
            **({"deepspeed_multinode_launcher": "standard"} if nodes > 1 else {}),
        },
        "distributed_type": "DEEPSPEED",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": cluster.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if slices := _slices_of_loaders(config):
        content["parallelism_config"] = {"parallelism_config_sp_size": slices}
    does, by = _switch_of(recomputes, moves)
    remark = f"# The plan {does}: {by}.\n" if does else ""
    write_files(folder, config, content, remark)
    far = " --machine_rank N --main_process_ip HOST --main_process_port PORT" if nodes > 1 else ""
    lines = [f"wrote {file} and {launcher}; start: accelerate launch --config_file {launcher}{far} SCRIPT"]
    return [*lines, *([f"the plan {does}; the script must enable it: {by}"] if does else [])]

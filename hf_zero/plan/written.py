"""What a plan writes: ``ds.json`` and a configuration of ``accelerate launch`` that names it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.plan.cluster import Cluster
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
    """Return where the two files go.

    Raises:
        ConfigError: One is there already: it may be another run's.
    """
    files = folder.absolute() / "ds.json", folder.absolute() / "accelerate.yaml"
    for file in files:
        if os.path.lexists(file):
            raise ConfigError(f"--write: {file} is there already; name another folder, or move it away")
    return files


def write_files(folder: Path, config: Mapping[str, Any], launcher: Mapping[str, Any] | None, remark: str = "") -> list[Path]:
    """Writes the configuration, and what starts it where that is known; the folder is made where there is none.

    Returns:
        What was written.

    Raises:
        ConfigError: The folder cannot be written, or has such files.
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
        raise ConfigError(f"--write: {folder} cannot be written: {error.strerror or error}") from error
    return list(texts)


def write(folder: Path, config: Mapping[str, Any], cluster: Cluster, recomputes: bool, moves: bool = False) -> list[str]:
    """Writes both files; the folder is made where there is none.

    Args:
        folder: Where to.
        config: The DeepSpeed configuration.
        cluster: The ranks.
        recomputes: The plan recomputes activations, which is the model's to do.
        moves: What the forward keeps waits on the host, which is the script's to do.

    Returns:
        What is to be done with them, in lines.

    Raises:
        ConfigError: The folder cannot be written, or has such files.
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
    does, by = _ACTIVATIONS.get((recomputes, moves), ("", ""))
    remark = f"# The plan {does}: {by}.\n" if does else ""
    write_files(folder, config, content, remark)
    far = " --machine_rank N --main_process_ip HOST --main_process_port PORT" if nodes > 1 else ""
    lines = [f"wrote {file} and {launcher}; start: accelerate launch --config_file {launcher}{far} SCRIPT"]
    return [*lines, *([f"the script {does}: {by}"] if does else [])]

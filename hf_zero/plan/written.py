"""What a search writes: ``ds.json`` and a configuration of ``accelerate launch`` that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.plan.run import Cluster

_RECOMPUTES = "gradient_checkpointing=True of the training arguments, or model.gradient_checkpointing_enable()"


def write(folder: Path, config: Mapping[str, Any], cluster: Cluster, recomputes: bool) -> list[str]:
    """Writes both files; the folder is made where there is none.

    Args:
        folder: Where to.
        config: The DeepSpeed configuration.
        cluster: The ranks.
        recomputes: The plan recomputes activations, which is the model's to do.

    Returns:
        What is to be done with them, in lines.

    Raises:
        ConfigError: The folder cannot be written.
    """
    import yaml

    file, launcher = folder / "ds.json", folder / "accelerate.yaml"
    nodes = -(-cluster.ranks // cluster.ranks_per_node)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": str(file.resolve()),
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
    remark = f"# The plan recomputes activations: {_RECOMPUTES}.\n" if recomputes else ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        launcher.write_text(remark + yaml.safe_dump(content), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {folder}: {error.strerror or error}") from error
    far = " --machine_rank N --main_process_ip HOST --main_process_port PORT" if nodes > 1 else ""
    lines = [f"wrote {file} and {launcher}; start: accelerate launch --config_file {launcher}{far} SCRIPT"]
    return [*lines, *([f"the script recomputes activations: {_RECOMPUTES}"] if recomputes else [])]

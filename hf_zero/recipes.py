"""Provide ``hf-zero recipes``: pairs of a DeepSpeed configuration and accelerate's YAML, by task and number of GPUs.

All recipes are in one table; sizes that depend on the number of GPUs are computed when a recipe is written. Listing needs no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_zero.errors import ConfigError

Task = Literal["full", "lora", "qlora", "long", "moe"]
_TRL_LORA = "--use_peft --lora_target_modules all-linear"
# Flags of TrainingArguments, and of TRL's scripts for adapters. TRL's default of bf16 is None, so --bf16 needs a value.
FLAGS: Mapping[Task, str] = {
    "full": "--bf16 true --gradient_checkpointing",
    "lora": f"--bf16 true --gradient_checkpointing {_TRL_LORA}",
    "qlora": f"--bf16 true --gradient_checkpointing {_TRL_LORA} --load_in_4bit --use_bnb_nested_quant",
    "long": "--bf16 true --gradient_checkpointing",
    "moe": "--bf16 true --gradient_checkpointing",
}


@dataclass(frozen=True)
class Recipe:
    """A recipe: the settings from which the two files are made.

    Attributes:
        name: Name on the command line.
        task: Kind of training, a key of ``FLAGS``.
        gpus: Default number of GPUs of all nodes together; ``--gpus`` sets another number.
        stage: ZeRO stage.
        use: Short description of the case that the recipe is for.
        zero: Further keys of ``zero_optimization``.
        nodes: Number of machines.
        per_node: Key of ``zero_optimization`` that is set to the number of GPUs per node; "" for none.
        experts: Whether the ranks divide the experts of each layer among them.
        sequence: Whether the ranks divide the tokens of each sample among them.
    """

    name: str
    task: Task
    gpus: int
    stage: int
    use: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    per_node: str = ""
    experts: bool = False
    sequence: bool = False


_HOST = {"offload_optimizer": {"device": "cpu"}}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("full-1", "full", 1, 2, "full fine-tuning on one GPU, masters and moments on the host", _HOST),
        Recipe("full-8", "full", 8, 3, "full fine-tuning on one node, everything sharded"),
        Recipe("full-8-offload", "full", 8, 3, "like full-8, with masters and moments on the host", _HOST),
        Recipe("lora-1", "lora", 1, 2, "LoRA, the base fits one GPU in 16 bit"),
        Recipe("lora-8", "lora", 8, 3, "LoRA, the base is sharded over the GPUs"),
        Recipe("qlora-1", "qlora", 1, 2, "LoRA on a base in 4 bit that fits one GPU"),
        Recipe("qlora-8", "qlora", 8, 3, "LoRA on a base in 4 bit that is sharded over the GPUs"),
        Recipe("long-8", "long", 8, 3, "long sequences: each sample is divided over the GPUs", sequence=True),
        Recipe("moe-8", "moe", 8, 3, "mixtures of experts: the GPUs share the experts of each layer", experts=True),
        Recipe(
            "nodes-16", "full", 16, 3, "two nodes: sharded inside each, one all-reduce a step between", nodes=2, per_node="mics_shard_size"
        ),
    )
}


def config_of(recipe: Recipe, gpus: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a recipe.

    Args:
        recipe: The recipe.
        gpus: Number of GPUs of all nodes together.
    """
    zero: dict[str, Any] = {"stage": recipe.stage, **recipe.zero}
    if recipe.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if recipe.per_node:
        zero[recipe.per_node] = gpus // recipe.nodes
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    if recipe.experts:
        config["expert_parallel"] = {"enabled": True, "autoep_size": gpus}
    if recipe.sequence:
        config["sequence_parallel_size"] = gpus
    return config


def launcher_of(recipe: Recipe, gpus: int, file: Path) -> dict[str, Any]:
    """Return the content of accelerate's YAML file.

    Args:
        recipe: The recipe.
        gpus: Number of GPUs of all nodes together.
        file: Absolute path of the DeepSpeed configuration.
    """
    answers: dict[str, Any] = {"deepspeed_config_file": str(file), "zero3_init_flag": recipe.stage == 3}
    if recipe.nodes > 1:
        answers["deepspeed_multinode_launcher"] = "standard"
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": answers,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": recipe.nodes,
        "num_processes": gpus,
        "use_cpu": False,
    }
    if recipe.sequence:
        content["parallelism_config"] = {
            "parallelism_config_sp_size": gpus,
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length_is_variable": True,
            "parallelism_config_sp_attn_implementation": "sdpa",
        }
    return content


def command_of(recipe: Recipe, launcher: Path) -> str:
    """Return the shell command that starts a script with a recipe's files."""
    far = " --machine_rank N --main_process_ip HOST --main_process_port 29500" if recipe.nodes > 1 else ""
    return f"accelerate launch --config_file {launcher}{far} train.py {FLAGS[recipe.task]}"


def remarks_of(recipe: Recipe) -> list[str]:
    """Return lines with the requirements of a recipe that the user must check before the start."""
    lines = [
        "train.py is a script with Trainer or TRL, with its flags. A loop over accelerate sets the same in code and uses the same files."
    ]
    if recipe.task in ("lora", "qlora"):
        lines.append("The flags for adapters are those of TRL's scripts (sft.py, dpo.py); other scripts must make a LoraConfig themselves.")
    if recipe.sequence:
        lines.append(
            'Load the model with attn_implementation="sdpa", as in the YAML; the length of sequences must be a multiple of the GPUs.'
        )
    if recipe.experts:
        lines.append(
            "The number of experts of a layer must be a multiple of the GPUs; if not, set a smaller expert_parallel.autoep_size in ds.json."
        )
    if recipe.nodes > 1:
        lines.append(
            f"Run the command on each of the {recipe.nodes} machines: N is 0 to {recipe.nodes - 1}, HOST is the address of machine 0."
        )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "name", nargs="?", choices=list(RECIPES), metavar="NAME", help="name of the recipe; without it all recipes are listed"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs of all machines together (default: the recipe's)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write ds.json and accelerate.yaml to; without it both are printed"
    )


def run(options: argparse.Namespace) -> int:
    """List the recipes, print one, or write its two files and print the command to run; return 0.

    Raises:
        ConfigError: ``--gpus`` does not fit the recipe, or one of the files exists already.
    """
    if options.name is None:
        if options.gpus is not None or options.out is not None:
            raise ConfigError(f"recipes: --gpus and --out need the NAME of a recipe; allowed are {', '.join(RECIPES)}")
        print(_table())
        return 0
    recipe = RECIPES[options.name]
    gpus = _gpus(recipe, options.gpus)
    if options.out is None:
        import yaml

        config, launcher = config_of(recipe, gpus), launcher_of(recipe, gpus, Path("ds.json"))
        print(f"# ds.json\n{json.dumps(config, indent=2)}\n\n# accelerate.yaml\n{yaml.safe_dump(launcher, sort_keys=False)}")
        print(f"# {command_of(recipe, Path('accelerate.yaml'))}")
        return 0
    from hf_zero.plan.written import places, write_files

    file, starter = places(options.out)
    write_files(options.out, config_of(recipe, gpus), launcher_of(recipe, gpus, file))
    print(f"wrote {file} and {starter}")
    print(f"start: {command_of(recipe, starter)}")
    for line in remarks_of(recipe):
        print(line)
    print(f"check: hf-zero explain {file} --world {gpus}")
    return 0


def _gpus(recipe: Recipe, wanted: int | None) -> int:
    gpus = recipe.gpus if wanted is None else wanted
    least = 2 * recipe.nodes if recipe.nodes > 1 else 2 if recipe.experts or recipe.sequence else 1
    if gpus < least or gpus % recipe.nodes:
        each = f", a multiple of its {recipe.nodes} machines" if recipe.nodes > 1 else ""
        raise ConfigError(f"--gpus is {gpus}; {recipe.name} needs {least} or more{each}")
    return gpus


def _table() -> str:
    rows = [("name", "GPUs", "stage", "use"), *((one.name, str(one.gpus), str(one.stage), one.use) for one in RECIPES.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return "\n".join([*lines, "", "hf-zero recipes NAME --out DIR   writes both files; --gpus N for another number of GPUs"])

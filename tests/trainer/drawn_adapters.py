"""Adapters of PEFT for drawn runs of TRL's trainers: kinds, options, and the habits of the scripts that make them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import ranks

MODULES = ["q_proj", "v_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]  # in- and outputs of one size
# Class of the configuration, and its options; each fits the Llama of ``trainers.save_models``, of width 32.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": MODULES}),
    "lora, all": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "lora, dropout": ("LoraConfig", {"r": 4, "target_modules": MODULES, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": MODULES, "use_dora": True}),
    "rslora": ("LoraConfig", {"r": 4, "target_modules": MODULES, "use_rslora": True, "init_lora_weights": "gaussian"}),
    "pissa": ("LoraConfig", {"r": 4, "target_modules": MODULES, "init_lora_weights": "pissa"}),
    "pissa, fast": ("LoraConfig", {"r": 4, "target_modules": MODULES, "init_lora_weights": "pissa_niter_4"}),
    "olora": ("LoraConfig", {"r": 4, "target_modules": MODULES, "init_lora_weights": "olora"}),
    "orthogonal": ("LoraConfig", {"r": 4, "target_modules": MODULES, "init_lora_weights": "orthogonal"}),
    "head": ("LoraConfig", {"r": 4, "target_modules": MODULES, "modules_to_save": ["lm_head"]}),
    "head and embeddings": ("LoraConfig", {"r": 4, "target_modules": MODULES, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "embeddings": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}),
    "norms": ("LoraConfig", {"r": 4, "target_modules": MODULES, "modules_to_save": ["norm"]}),
    "parameters": ("LoraConfig", {"r": 4, "target_modules": [], "target_parameters": ["q_proj.weight", "mlp.up_proj.weight"]}),
    "one layer": ("LoraConfig", {"r": 4, "target_modules": MODULES, "layers_to_transform": [1]}),
    "patterns": ("LoraConfig", {"r": 4, "target_modules": MODULES, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 16}}),
    "tokens": ("LoraConfig", {"r": 4, "target_modules": MODULES, "trainable_token_indices": [3, 9, 20]}),
    "biases": ("LoraConfig", {"r": 4, "target_modules": MODULES, "lora_bias": True}),
    "lora biases": ("LoraConfig", {"r": 4, "target_modules": MODULES, "bias": "lora_only"}),
    "adalora": ("AdaLoraConfig", {"target_modules": MODULES, "init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1,
                                  "total_step": 4}),
    "vera": ("VeraConfig", {"target_modules": SQUARE, "r": 8}),
    "pvera": ("PveraConfig", {"target_modules": SQUARE, "r": 8}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "loha": ("LoHaConfig", {"target_modules": MODULES, "r": 4}),
    "lokr": ("LoKrConfig", {"target_modules": MODULES, "r": 4}),
    "oft": ("OFTConfig", {"target_modules": SQUARE, "oft_block_size": 8}),
    "boft": ("BOFTConfig", {"target_modules": SQUARE, "boft_block_size": 8, "boft_n_butterfly_factor": 1}),
    "hra": ("HRAConfig", {"target_modules": MODULES, "r": 4}),
    "hira": ("HiraConfig", {"target_modules": MODULES, "r": 4}),
    "layer norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "prefix, projection": ("PrefixTuningConfig", {"num_virtual_tokens": 4, "prefix_projection": True, "encoder_hidden_size": 16}),
    "cpt": ("CPTConfig", {"cpt_token_ids": [3, 9, 20, 21], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2, 4]}),
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}),
    "fourier": ("FourierFTConfig", {"target_modules": MODULES, "n_frequency": 40, "scaling": 20.0}),
    "wave": ("WaveFTConfig", {"target_modules": MODULES, "n_frequency": 40}),
    "randlora": ("RandLoraConfig", {"target_modules": MODULES, "r": 8, "randlora_alpha": 16}),
    "vblora": ("VBLoRAConfig", {"target_modules": SQUARE, "r": 2, "num_vectors": 20, "vector_length": 16}),
    "miss": ("MissConfig", {"target_modules": MODULES, "r": 4}),
    "bone": ("MissConfig", {"target_modules": MODULES, "r": 4, "init_weights": "bat"}),
    "shira": ("ShiraConfig", {"target_modules": MODULES, "r": 4, "random_seed": 3}),
    "c3a": ("C3AConfig", {"target_modules": MODULES, "block_size": 8}),
    "trainable tokens": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [3, 9, 20]}),
    "road": ("RoadConfig", {"target_modules": MODULES, "group_size": 16}),
    "delora": ("DeloraConfig", {"target_modules": MODULES, "r": 4}),
    "gralora": ("GraloraConfig", {"target_modules": MODULES, "r": 4, "gralora_k": 2}),
    "osf": ("OSFConfig", {"target_modules": MODULES, "effective_rank": 8}),
    "psoft": ("PsoftConfig", {"target_modules": MODULES, "r": 4}),
    "tiny": ("TinyLoraConfig", {"target_modules": MODULES, "r": 2, "u": 8}),
    "unilora": ("UniLoraConfig", {"target_modules": MODULES, "r": 4, "theta_d_length": 32}),
    "lily": ("LilyConfig", {"target_modules": MODULES, "r": 4}),
    "glora": ("GloraConfig", {"target_modules": MODULES, "r": 4}),
    "deft": ("DeftConfig", {"target_modules": MODULES, "r": 4}),
    "peanut": ("PeanutConfig", {"target_modules": MODULES, "r": 4}),
    "beft": ("BeftConfig", {"target_modules": ["v_proj"]}),
    "frod": ("FrodConfig", {"target_modules": MODULES}),
    "supertuning": ("SupertuningConfig", {"target_modules": MODULES, "sparsity": 0.9}),
    "shadow": ("ShadowConfig", {}),
    "cartridge": ("CartridgeConfig", {"num_virtual_tokens": 4}),
}  # fmt: skip
LORA = tuple(name for name, (kind, _) in KINDS.items() if kind == "LoraConfig")
PROMPTS = ("prompt", "p-tuning", "prefix", "prefix, projection", "cpt", "cartridge", "adaption prompt")
# How a script makes the adapter: the trainer does, the script before it, the script loads one, or it has two that it switches.
MADE = ("by the trainer", "before", "loaded", "two")


def config_of(kind: str, task: str) -> Any:
    """Return the configuration of a kind of ``KINDS``; ``task``: "CAUSAL_LM" or "SEQ_CLS"."""
    import peft

    name, options = KINDS[kind]
    options = copy.deepcopy(options)  # PEFT adds to its lists
    if task == "SEQ_CLS" and "lm_head" in options.get("modules_to_save", ()):
        options["modules_to_save"] = ["score", *options["modules_to_save"][1:]]
    return getattr(peft, name)(task_type=task, **options)


def adapted(base: nn.Module, kind: str, made: str, task: str, folder: Path, plain: Any) -> nn.Module:
    """Return ``base`` with an adapter, equal on all ranks; ``plain()`` makes the same base unsharded, for an adapter to be loaded."""
    import torch.distributed as dist
    from peft import PeftModel, get_peft_model

    if made == "loaded":
        if ranks.rank() == 0:
            torch.manual_seed(7)
            get_peft_model(plain(), config_of(kind, task)).save_pretrained(folder / "adapter")
        dist.barrier()
        return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    torch.manual_seed(5)
    model = get_peft_model(base, config_of(kind, task))
    if made == "two":
        model.add_adapter("other", config_of(kind, task))
        for name, param in model.named_parameters():
            if ".other." in name:
                param.requires_grad_(True)
    return model


def callbacks_of(kind: str | None, made: str, habit: str | None) -> list[Any]:
    """Return callbacks that do what PEFT's pages ask of a loop, and habits of scripts."""
    from transformers import TrainerCallback

    class Own(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if made == "two":  # DDP has been built with both; PEFT freezes the one that it leaves
                model.set_adapter("other")
                model.set_adapter("default")

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if made == "two":
                model.set_adapter("default" if state.global_step % 2 == 0 else "other")
            if habit == "merges" and state.global_step == 2:
                with gathered(args, model):
                    model.merge_adapter()
                    model.unmerge_adapter()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if kind == "adalora":
                with gathered(args, model, modifier_rank=0):
                    model.base_model.update_and_allocate(state.global_step)

    return [Own()] if kind == "adalora" or made == "two" or habit == "merges" else []


def gathered(args: Any, model: nn.Module, **options: Any) -> Any:
    """Return the context in which scripts read or write adapters: TRL's, which gathers at stage 3."""
    if args.deepspeed_plugin is None or args.deepspeed_plugin.zero_stage < 3:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()), **options)


@contextlib.contextmanager
def tokens_on_the_host() -> Iterator[None]:
    """Let PEFT's ``_collect_token_weights`` put rows on the device of the embedding: PEFT 0.21 has written it for CUDA alone."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    def collect(self: Any, weight: torch.Tensor, rows: torch.Tensor, embed_dim: int) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
            return weight[rows].clone()

    former = TrainableTokensLayer._collect_token_weights
    TrainableTokensLayer._collect_token_weights = collect
    try:
        yield
    finally:
        TrainableTokensLayer._collect_token_weights = former

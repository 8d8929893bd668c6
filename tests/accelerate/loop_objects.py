"""Objects of a training loop with Accelerate that was drawn: model, optimizer, loaders, Accelerator and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerate.loop_options import Drawn
from tests.support import ranks, trainers
from tests.trainer.drawn_options import AXES
from tests.trainer.drawn_runs import Rows


class Mlp(nn.Module):
    """A small network, one of whose parameters belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(trainers.VOCAB, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, trainers.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        return {"logits": self.head(self.norm(hidden))}


def model_of(run: Drawn, models: Path) -> nn.Module:
    torch.manual_seed(11)
    if run["model"] == "mlp":
        return Mlp()
    options: dict[str, Any] = {}
    if run["dropout"]:
        names = {"gpt2": ("resid_pdrop", "attn_pdrop", "embd_pdrop"), "llama": ("attention_dropout",)}
        options = dict.fromkeys(names[run["model"]], 0.1)
    model: Any = trainers.load(models, run["model"], **options)
    if run["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": run["checkpointing"] == "reentrant"})
    return model  # type: ignore[no-any-return]


def optimizer_of(run: Drawn, model: nn.Module) -> torch.optim.Optimizer:
    params: Any = list(model.parameters())
    if run["optimizer"] == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    if run["optimizer"] == "adagrad":
        return torch.optim.Adagrad(params, lr=0.01)
    if run["optimizer"] == "groups":
        params = [
            {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
    return torch.optim.AdamW(params, lr=2e-3, fused=True if run["optimizer"] == "fused" else None)


def loader_of(run: Drawn, count: int, seed: int, train: bool) -> DataLoader[Any]:
    found: Any = trainers.rows(count, seed)
    if train and run["loader"] == "iterable":
        return DataLoader(Rows(found), batch_size=run["batch"])
    batch = run["batch"] * (2 if run["loader"] == "split" else 1)
    return DataLoader(found, batch_size=batch, shuffle=train, drop_last=train and run["loader"] == "drop_last")


def accelerator_of(run: Drawn, folder: Path, config: Any) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, GradientAccumulationPlugin

    trainers.forget()
    kind = run["loader"]
    options: dict[str, Any] = {"split_batches": kind == "split", "use_seedable_sampler": kind != "seedless"}
    if kind in ("dispatch", "iterable"):
        options["dispatch_batches"] = kind == "dispatch"
    if kind == "uneven":
        options["even_batches"] = False
    more: dict[str, Any] = {"cpu": True} if config is None else {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    if config is None and run["change"] == "freezes":
        more["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    plugins: dict[str, dict[str, bool]] = {
        "not with the loader": {"sync_with_dataloader": False},
        "not adjusted": {"adjust_scheduler": False},
        "each batch": {"sync_each_batch": True},
    }
    steps = run["accumulation"] if run["pattern"] == "accumulate" else 1
    if run["plugin"]:
        more["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=steps, **plugins[run["plugin"]])
    else:
        more["gradient_accumulation_steps"] = steps
    if run["axis"] == "sequence" and config is not None:
        from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        more["parallelism_config"] = ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", dp_shard_size=ranks.world() // 2, sp_handler=handler
        )
    return Accelerator(
        mixed_precision=run["precision"],
        dataloader_config=DataLoaderConfiguration(**options),
        step_scheduler_with_optimizer=run["scheduler"] != "not with the optimizer",
        project_dir=str(folder),
        **more,
    )


def config_of(run: Drawn) -> dict[str, Any]:
    config = trainers.zero_config(run["stage"], gradient_clipping="auto" if run["clip"] else 0.0)
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if run["prepare"] != "together":
        config["train_micro_batch_size_per_gpu"] = run["batch"]
    if run["offload"]:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if run["offload"] == "both":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return config if run["axis"] == "sequence" else config | AXES.get(run["axis"] or "", {})

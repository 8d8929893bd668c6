"""Makes a small checkpoint with DeepSpeed, for the tests of ``hf-zero convert``. Runs in a venv that has DeepSpeed and PyTorch:

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 tests/checkpoint/make_deepspeed_checkpoint.py STAGE fp32|bf16|fp16 FOLDER [JSON]

Trains three steps, saves, writes the whole fp32 weights that DeepSpeed's own script makes of it to ``expected.safetensors``, trains two
more steps and writes their losses, and the loss scales before and after them, to ``expected.json``. JSON is laid over the configuration.

Folders that end in ``_universal`` have, in place of ``global_step3`` and ``latest``, what DeepSpeed 0.19.8 makes of the folder without this
ending: ``python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder ... --output_folder ...``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVED_STEPS = 3
CLIENT_STATE = {"epoch": 2, "pair": (1, "a")}


class Model(nn.Module):
    """A frozen layer, tied weights, buffers, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(5, 9)
        self.frozen = nn.Linear(9, 9, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 3)
        self.twin = nn.Linear(9, 3)
        self.twin.weight = self.head.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.randn(9))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.entry(inputs) + self.shift.to(inputs.dtype)
        hidden = hidden + self.frozen(hidden)
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        hidden = self.norm(hidden)
        return self.head(hidden) + self.twin(hidden)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with decayed and undecayed parameters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def config_of(stage: int, dtype: str) -> dict[str, Any]:
    """The configuration that both packages train with."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config[dtype] |= {"initial_scale_power": 8, "loss_scale_window": 2}  # grows while these few steps are taken
    return config


def train(engine: Any, first: int, count: int, rank: int, dtype: str) -> list[float]:
    """This rank's losses of ``count`` steps."""
    losses = []
    for step in range(first, first + count):
        inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(inputs.to(DTYPES[dtype])).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def scale_of(engine: Any) -> float:
    """The loss scale; 1 without fp16."""
    return float(getattr(engine.optimizer, "cur_scale", 1.0))


def main() -> None:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param
    from safetensors.torch import save_file

    stage, dtype, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    config = config_of(stage, dtype) | json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}")
    # It refuses fp16 on processors without fast fp16; PyTorch computes it on any.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = Model()
    engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    rank = dist.get_rank()
    train(engine, 0, SAVED_STEPS, rank, dtype)
    engine.save_checkpoint(str(folder), client_state=CLIENT_STATE)
    scales = [scale_of(engine)]
    masters = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters() if param.requires_grad}
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, train(engine, SAVED_STEPS, 2, rank, dtype))
    scales.append(scale_of(engine))
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        try:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        except ValueError:  # it cannot read what stage 1 in bf16 with grad_accum_dtype fp32 writes
            weights = masters
        save_file({name: value.detach().clone().contiguous() for name, value in weights.items()}, folder / "expected.safetensors")
        (folder / "expected.json").write_text(json.dumps({"stage": stage, "dtype": dtype, "losses": losses, "scales": scales}))
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed's own; the tests need the data alone
            (folder / script).unlink(missing_ok=True)
    dist.barrier()


if __name__ == "__main__":
    main()

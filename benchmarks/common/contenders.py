"""The contenders of the benchmarks on devices: each builds its model and returns the function that trains one step.

Needs only torch, transformers and the contender's package; PEFT, torchao and Liger if a job asks for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.training import build_model

LR, WEIGHT_DECAY = 1e-4, 0.1
SCALE = 128.0  # static loss scale of fp16, so that every contender does the same steps
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Job:
    """Settings of a run, from the command line.

    Attributes:
        contender: A key of ``CONTENDERS``, or ``rates``.
        device: ``cuda``, ``cpu``, or ``pretend`` for the tests' pretend accelerator.
        dtype: ``bf16`` or ``fp16``.
        size: layers, width, heads, vocab, length, batch.
        shape: A shape of ``training.build_model``.
        stage: ZeRO stage of hf_zero and DeepSpeed.
        offload: Keep parameters and optimizer on the host; without it, torch's fused AdamW is the client's optimizer everywhere.
        reshard: FSDP2 drops whole parameters after forward.
        compiled: What torch.compile takes: ``blocks``, each for itself; ``whole``, the wrapped model (DDP only); empty for nothing.
        backend: Back end of torch.compile.
        float8: torchao computes the products of all linear layers but the head in float8, with one scale for each tensor.
        liger: Liger's kernels replace the model's norms, rotary embeddings, activations and loss.
        lora: Rank of adapters on all linear layers but the head; the base is frozen, in 16 bit. 0 trains the complete model.
        cap_gib: GPU memory that torch may allocate; 0 for all.
        host_gib: Resident host memory at which the process ends itself; 0 for no limit.
        steps: Number of timed steps.
        together: Number of steps between two waits for the device, one reading; the host may run ahead in between.
        warmup: Number of steps before the timed ones.
        overlap: ``hf_zero.offload_overlap``.
        trace: Path for one step's profile; empty for none.
        search: Train with the largest batch that fits ``cap_gib``, instead of that of ``size``, with which the search begins.
        most: A batch that the search does not exceed; 0 for none.
    """

    contender: str
    device: str
    dtype: str
    size: dict[str, int]
    shape: str = "gpt2"
    stage: int = 3
    offload: bool = True
    reshard: bool = True
    compiled: str = ""
    backend: str = "inductor"
    float8: bool = False
    liger: bool = False
    lora: int = 0
    cap_gib: float = 0.0
    host_gib: float = 0.0
    steps: int = 5
    together: int = 1
    warmup: int = 2
    overlap: str = "auto"
    trace: str = ""
    search: bool = False
    most: int = 0


# ------------------------------------------------------------------------------------------------ models


@contextlib.contextmanager
def _in_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def built(job: Job, place: torch.device) -> nn.Module:
    """Return the job's model in train mode, built on the device ``place``.

    A frozen base is built in 16 bit, because all contenders keep it so.
    """
    if job.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    with _in_dtype(DTYPES[job.dtype] if job.lora else torch.float32), place:
        model: Any = build_model(job.shape, job.size)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear"))
    if job.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # On a CPU torchao computes in float32 from values that were rounded to float8.
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=job.device != "cuda"), module_filter_fn=_in_float8)
    return model.train()


def _in_float8(module: nn.Module, name: str) -> bool:
    # The matrix units take sizes that 16 divides.
    return "lm_head" not in name and not any(size % 16 for size in getattr(module, "weight", torch.empty(0)).shape)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer's layers."""
    return list(next(module for module in model.modules() if isinstance(module, nn.ModuleList)))


def _of_peer(job: Job, on_host: bool = False) -> nn.Module:
    """Return the model of a contender that has no ``compile`` of its own, with compiled blocks if the job asks for them.

    Initial values are drawn on the device even ``on_host``, unless the model fills half of it: a host takes a minute for a billion.
    """
    place, moves = torch.device(job.device), on_host and job.device != "cpu"
    if moves:
        with torch.device("meta"):
            nbytes = sum(4 * param.numel() for param in build_model(job.shape, job.size).parameters())
        place = place if 2 * nbytes <= job.cap_gib * 2**30 else torch.device("cpu")
    model = built(job, place)
    if moves:
        model = model.to("cpu")
    for block in blocks_of(model) if job.compiled == "blocks" else ():
        block.compile(backend=job.backend)
    return model


# ------------------------------------------------------------------------------------------------ engines


def _config(job: Job) -> dict[str, Any]:
    section: dict[str, Any] = {"enabled": True}
    if job.dtype == "fp16":
        section["loss_scale"] = SCALE
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.size["batch"],
        "gradient_clipping": 1.0,
        job.dtype: section,
        "zero_optimization": {"stage": job.stage},
    }
    if job.offload:
        blocks = {name: {"device": "cpu", "pin_memory": job.device != "cpu"} for name in ("offload_optimizer", "offload_param")}
        config["zero_optimization"] |= blocks
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    else:
        config["zero_allow_untested_optimizer"] = True
    return config


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def _engine(package: Any, job: Job, model: nn.Module, config: dict[str, Any]) -> Any:
    """Return an engine with DeepSpeed's interface."""
    own = {} if job.offload else {"optimizer": _adamw(model)}
    trained = [param for param in model.parameters() if param.requires_grad]
    return package.initialize(model=model, model_parameters=trained, config=config, **own)[0]


def _engine_step(engine: Any) -> Step:
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def hf_zero(job: Job) -> Step:
    """Return the step of hf_zero; at stage 3 the model is built in shards, except one that torchao converts."""
    import hf_zero

    config = {**_config(job), "hf_zero": {"offload_overlap": job.overlap}}
    sharded = job.stage == 3 and not job.float8
    # Without the device, zero.Init draws the values where plain PyTorch would, on the host, more than a minute for 8 B parameters.
    with hf_zero.zero.Init(config_dict_or_path=config) if sharded else contextlib.nullcontext():
        model = built(job, torch.device(job.device))
    engine = _engine(hf_zero, job, model, config)
    if job.compiled:
        engine.compile(backend=job.backend)
    return _engine_step(engine)


def deepspeed(job: Job) -> Step:
    """Return DeepSpeed's step; with offload the model is built in host memory, because its ``zero.Init`` fails with some torch versions."""
    import deepspeed

    model = _of_peer(job, on_host=job.offload).to(DTYPES[job.dtype])
    return _engine_step(_engine(deepspeed, job, model, _config(job)))


# ------------------------------------------------------------------------------------------------ plain loops


def _loop(job: Job, model: nn.Module, autocast: bool) -> Step:
    optimizer = _adamw(model)
    scale = SCALE if job.dtype == "fp16" else 1.0

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(job.device, dtype=DTYPES[job.dtype]) if autocast else contextlib.nullcontext():
            loss: Tensor = model(**batch).loss
        (loss * scale).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        if scale != 1.0:
            for grad in grads:
                grad.mul_(1.0 / scale)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(job: Job) -> Step:
    """Return the step of ``fully_shard``; with offload ``CPUOffloadPolicy``, except on a CPU, where there is nothing to offload from."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = job.offload and job.device != "cpu"
    model: Any = _of_peer(job, on_host=offload)
    options = {
        "mesh": init_device_mesh(job.device, (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=DTYPES[job.dtype]),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        "reshard_after_forward": job.reshard,
    }
    for block in blocks_of(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _loop(job, model, autocast=False)


def pytorch(job: Job) -> Step:
    """Return the step of plain PyTorch: fp32 parameters on the device, autocast, torch's fused AdamW."""
    return _loop(job, _of_peer(job), autocast=True)


def ddp(job: Job) -> Step:
    """Return the step of plain PyTorch in DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped: Any = DistributedDataParallel(_of_peer(job), gradient_as_bucket_view=True)
    return _loop(job, torch.compile(wrapped, backend=job.backend) if job.compiled == "whole" else wrapped, autocast=True)


CONTENDERS: dict[str, Callable[[Job], Step]] = {"hf_zero": hf_zero, "deepspeed": deepspeed, "fsdp2": fsdp2, "pytorch": pytorch, "ddp": ddp}
PACKAGES = ("hf_zero", "deepspeed")  # contenders that are packages of this name

"""Runs of one script with drawn configuration files: ``import deepspeed`` is DeepSpeed or hf_zero, depending on the interpreter.

``python drawn_files_worker.py CASES.json FOLDER`` forks two ranks for each case and writes ``FOLDER/<case>.<rank>.json``, beside a log.
The file imports nothing of this project, because DeepSpeed's interpreter does not have it.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

LIMIT = 120.0  # seconds for one case; a rank that is still there hangs
WORDS, WIDTH, LENGTH = 16, 8, 4
GETTERS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping zero_optimization
    zero_optimization_stage zero_allow_untested_optimizer zero_overlap_comm zero_reduce_scatter
    zero_contiguous_gradients zero_sub_group_size zero_reduce_bucket_size zero_allgather_bucket_size
    zero_allgather_partitions zero_max_live_parameters zero_max_reuse_distance zero_prefetch_bucket_size
    zero_param_persistence_threshold zero_model_persistence_threshold zero_gather_16bit_weights_on_model_save
    zero_ignore_unused_parameters zero_round_robin_gradients zero_hpz_partition_size zero_quantized_weights
    zero_quantized_gradients zero_optimization_partition_gradients zero_optimization_partition_weights zero_cpu_offload
    zero_use_cpu_optimizer zero_force_ds_cpu_optimizer zero_load_from_fp32_weights zero_elastic_checkpoint
    zero_legacy_stage1 fp16_enabled bfloat16_enabled fp16_auto_cast loss_scale dynamic_loss_scale initial_dynamic_scale
    postscale_gradients gradient_predivide_factor steps_per_print wall_clock_breakdown dump_state memory_breakdown
    optimizer_name scheduler_name flops_profiler_enabled autotuning_enabled checkpoint_tag_validation_enabled
    checkpoint_tag_validation_fail load_universal_checkpoint managed_gradient_accumulation torch_autocast_enabled
    autotp_size use_node_local_storage communication_data_type dynamic_loss_scale_args get_data_types optimizer_params
    scheduler_params
""".split()  # noqa: SIM905


class Net(nn.Module):
    """Embedding, two residual layers with a norm, and a head; returns the loss."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=shape == "sparse")
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        if shape == "unused":
            self.unused = nn.Linear(WIDTH, WIDTH)
        if shape == "frozen":
            self.layers[0].requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, factor: float = 1.0, **extra: Any) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten()) * factor


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.rows[index].flip(0)


def groups_of(model: nn.Module, kind: str | None) -> Any:
    """Return what a script gives as ``model_parameters``, or to its optimizer."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind is None:
        return params
    low = [p for p in params if len(getattr(p, "ds_shape", p.shape)) < 2]  # inside zero.Init DeepSpeed's own are empty
    high = [p for p in params if len(getattr(p, "ds_shape", p.shape)) >= 2]
    return [{"params": high, "weight_decay": 0.1}, {"params": low, "weight_decay": 0.0, **({"lr": 5e-3} if kind == "rates" else {})}]


def client_optimizer(case: dict[str, Any], model: nn.Module) -> Any:
    kind = case["client_optimizer"]
    if kind is None:
        return None
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
    if kind.startswith("callable "):
        return lambda params: classes[kind.split()[1]](params, lr=1e-2)
    return classes[kind](groups_of(model, case["groups"]), lr=1e-2)


def client_scheduler(case: dict[str, Any], optimizer: Any) -> Any:
    kind = case["client_scheduler"]
    if kind is None:
        return None
    if kind == "callable" or optimizer is None or callable(optimizer):
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1.0 - 0.1 * step))
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1.0 - 0.1 * step))


def plain(value: Any) -> Any:
    """Return a value as JSON, with types by their names."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def read(function: Any) -> Any:
    """Return what a script reads, or the class of the error that it gets."""
    try:
        return plain(function())
    except Exception as error:
        return f"raises {type(error).__name__}"


class Run:
    """One script: its engine, and all that it sees."""

    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        self.case, self.folder, self.rank = case, folder, torch.distributed.get_rank()
        self.seen: list[dict[str, Any]] = []
        self.build()
        self.first = {name: read(lambda name=name: self.value_of(name)) for name in GETTERS}
        self.first["lr"] = read(lambda: self.engine.get_lr())
        self.first["groups"] = self.groups()
        self.micro = 0

    def value_of(self, name: str) -> Any:
        value = getattr(self.engine, name)
        return value() if callable(value) else value

    def build(self) -> None:
        case = self.case
        torch.manual_seed(3)
        config = json.loads(json.dumps(case["config"]).replace("FOLDER", str(self.folder)))
        if case["model"] in ("hf", "tied"):
            model = self.from_config(config)
        elif case["zero_init"]:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Net(case["model"])
            self.fill(model)  # DeepSpeed draws 16-bit numbers there
        else:
            model = Net(case["model"])
        optimizer = client_optimizer(case, model)
        given: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": client_scheduler(case, optimizer)}
        if case["parameters"] or case["groups"] and not case["client_optimizer"]:
            given["model_parameters"] = groups_of(model, case["groups"])
        if case["rows"]:
            given["training_data"] = Rows(case["rows"])
        self.engine, self.optimizer, self.loader, self.scheduler = deepspeed.initialize(model=model, config=config, **given)

    @staticmethod
    def fill(model: nn.Module) -> None:
        """Give each parameter values that bf16 has too."""
        made = torch.Generator().manual_seed(9)
        for param in model.parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                param.copy_((torch.randint(-64, 65, param.shape, generator=made) / 256).to(param.dtype))

    def from_config(self, config: dict[str, Any]) -> nn.Module:
        """Return a model of transformers, made as its page on DeepSpeed without Trainer does."""
        from transformers import AutoModelForCausalLM, LlamaConfig
        from transformers.integrations import HfDeepSpeedConfig

        shape = LlamaConfig(
            vocab_size=WORDS, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=16, tie_word_embeddings=self.case["model"] == "tied", bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        self.hf_config = HfDeepSpeedConfig(config) if self.case["zero_init"] else None
        model = AutoModelForCausalLM.from_config(shape)
        self.hf_config = None  # else the next model of this process is sharded too
        self.fill(model)
        return model  # type: ignore[no-any-return]

    def loss_of(self, ids: torch.Tensor, labels: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        if self.case["model"] in ("hf", "tied"):
            return self.engine(input_ids=ids, labels=labels).loss * factor
        return self.engine(ids, labels, factor)

    def batches(self) -> Any:
        if self.loader is not None:
            while True:
                yield from self.loader
        step = 0
        while True:
            rows = self.engine.train_micro_batch_size_per_gpu()
            made = torch.Generator().manual_seed(1000 * self.rank + step)
            ids = torch.randint(0, WORDS, (rows, LENGTH), generator=made)
            yield ids, ids.flip(1)
            step += 1

    def groups(self) -> Any:
        keys = ("lr", "weight_decay", "betas", "momentum", "eps")
        return read(lambda: [{key: group[key] for key in keys if key in group} for group in self.engine.optimizer.param_groups])

    def train(self, steps: int) -> None:
        case, engine = self.case, self.engine
        every = case["every"] or engine.gradient_accumulation_steps()
        end = self.micro + steps * every
        while self.micro < end:
            last = self.micro % every == every - 1
            if case["loop"] == "boundary":
                engine.set_gradient_accumulation_boundary(last)
            ids, labels = next(self.feed)
            factor = case["factor"] if self.micro in case["factor_at"] and self.rank == 0 else 1.0
            quiet = case["loop"] == "no_sync" and not last
            with engine.no_sync() if quiet else contextlib.nullcontext():
                loss = self.loss_of(ids, labels, factor)
                engine.backward(loss)
            row = {"loss": float(loss), "ids": ids.flatten().tolist(), "boundary": read(engine.is_gradient_accumulation_boundary)}
            if case["loop"] == "plain" or last:
                if case["scheduler_by_hand"] and self.scheduler is not None and last:
                    engine.step(lr_kwargs=None)
                    self.scheduler.step()
                else:
                    engine.step()
            self.micro += 1
            optimizer = engine.optimizer
            row |= {
                "lr": read(engine.get_lr), "mom": read(engine.get_mom), "groups": self.groups(),
                "norm": read(lambda: None if (norm := engine.get_global_grad_norm()) is None else float(norm)),
                "scale": read(lambda optimizer=optimizer: float(optimizer.cur_scale)),
                "loss_scale": read(lambda optimizer=optimizer: float(optimizer.loss_scale)),
                "global_steps": engine.global_steps, "skipped": engine.skipped_steps, "micro_steps": engine.micro_steps,
                "samples": engine.global_samples, "applied": read(engine.was_step_applied),
            }  # fmt: skip
            self.seen.append(row)
            if case["eval_every"] and self.micro % case["eval_every"] == 0:
                engine.eval()
                with torch.no_grad():
                    row["eval"] = float(self.loss_of(ids, labels))
                engine.train()

    def weights(self) -> dict[str, Any]:
        found = {}
        for name, param in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                found[name] = param.detach().float().clone().tolist()
        return found

    def whole(self) -> dict[str, Any]:
        self.feed = self.batches()
        case = self.case
        kept: dict[str, Any] = {}
        if case["save_at"]:
            self.train(case["save_at"])
            self.engine.save_checkpoint(str(self.folder / "saved"), tag=case["tag"], client_state={"mine": [1, 2], "step": self.micro})
            kept["latest"] = (self.folder / "saved" / "latest").read_text().strip() if self.rank == 0 else None
            self.train(1)
            if case["fresh"]:
                self.build()
                self.feed = self.batches()
            path, state = self.engine.load_checkpoint(str(self.folder / "saved"), tag=case["tag"], **case["load"])
            kept |= {"path": path is not None, "state": plain({k: v for k, v in (state or {}).items() if k in ("mine", "step")})}
            engine = self.engine
            kept |= {
                "steps": engine.global_steps,
                "skipped": engine.skipped_steps,
                "samples": engine.global_samples,
                "lr": read(engine.get_lr),
            }
        self.train(case["steps"])
        loader = None if self.loader is None else len(self.loader)
        scheduler = read(lambda: self.scheduler.state_dict()) if self.scheduler is not None else None
        if isinstance(scheduler, dict):
            scheduler = {
                key: value for key, value in scheduler.items() if key in ("last_batch_iteration", "last_epoch", "_last_lr", "base_lrs")
            }
        return {
            "first": self.first, "seen": self.seen, "kept": kept, "weights": self.weights(), "loader": loader, "scheduler": scheduler,
            "scheduler_type": type(self.scheduler).__name__, "files": files_of(self.folder, self.rank),
        }  # fmt: skip


def files_of(folder: Path, rank: int) -> dict[str, Any]:
    """Return the rows of all csv files that monitors wrote."""
    if rank:
        return {}
    found = {}
    for path in sorted(folder.rglob("*.csv")):
        with path.open() as file:
            head, *rows = csv.reader(file)
            found[str(path.relative_to(folder))] = [head, *([float(value) for value in row] for row in rows if row != head)]
    return found


def rank_of_case(case: dict[str, Any], rank: int, world: int, port: int, folder: Path, name: str) -> None:
    """Run one case as one rank of a fresh process group, and write the result."""
    log = os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    place = folder / f"{name}.files"
    place.mkdir(exist_ok=True)
    accelerator = deepspeed.accelerator.get_accelerator()
    with contextlib.suppress(AttributeError):
        type(accelerator).is_fp16_supported = lambda self: True  # torch computes fp16 on every CPU; DeepSpeed asks for fast instructions
    try:
        deepspeed.init_distributed("gloo")
        outcome: Any = Run(case, place).whole()
    except BaseException as error:
        where = [f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-3:]]
        outcome = {"error": f"{type(error).__name__}: {error}"[:1500], "where": where}
        traceback.print_exc()
    (folder / f"{name}.{rank}.part").write_text(json.dumps(outcome))
    os.rename(folder / f"{name}.{rank}.part", folder / f"{name}.{rank}.json")
    sys.stdout.flush()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if "hf_zero" in sys.modules:  # once, not in each rank
        importlib.import_module("hf_zero.deepspeed.initialize")
    if any(case["model"] in ("hf", "tied") for case in cases.values()):
        importlib.import_module("transformers.models.llama.modeling_llama")
    for name, case in cases.items():
        children, port = [], free_port()
        for rank in range(case["world"]):
            child = os.fork()
            if child == 0:
                rank_of_case(case, rank, case["world"], port, folder, name)
            children.append(child)
        waiting, limit = set(children), time.monotonic() + LIMIT
        while waiting and time.monotonic() < limit:
            waiting -= {child for child in waiting if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.02)
        for child in waiting:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()

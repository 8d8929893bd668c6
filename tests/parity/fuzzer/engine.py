"""Run a script of the fuzzer through the engine: one rank's side of a comparison."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import hf_zero
from hf_zero import utils
from hf_zero.core.units.marks import is_elsewhere
from hf_zero.core.units.parts import part_of, whole_of
from tests.parity.fuzzer import model as script_model
from tests.parity.fuzzer import sequences
from tests.parity.fuzzer.grammar import Cell
from tests.parity.fuzzer.model import ScriptError, Seen, noise
from tests.parity.fuzzer.plain import SETTINGS, averaged_twice, length_of, new_moments, new_weights
from tests.parity.fuzzer.side import Side

# Settings that must change no result, with the numbers of ranks and the stages for which they mean something.
UNDER: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "none": ({}, (1, 2), (0, 1, 2, 3)),
    "node_copies": ({"zero_optimization": {"zero_hpz_partition_size": 2}}, (4,), (3,)),
    "node_parameters": ({"hf_zero": {"param_shard_size": 2}}, (4,), (3,)),
    "shard_groups": ({"zero_optimization": {"mics_shard_size": 2}}, (4,), (1, 2, 3)),
    "host_states": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, (1, 2), (1, 2, 3)),
    "host": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}, (1, 2), (3,)
    ),
    "small_buckets": (
        {"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 0,
                               "stage3_max_live_parameters": 0, "sub_group_size": 100}}, (1, 2), (1, 2, 3)
    ),
}  # fmt: skip


def config_of(cell: Cell) -> dict[str, Any]:
    """Return the configuration of a cell, with DeepSpeed's keys."""
    zero: dict[str, Any] = {"stage": cell.stage}
    if cell.stage == 3:
        zero["stage3_param_persistence_threshold"] = cell.persist
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if not cell.keep:
            zero["stage3_max_reuse_distance"] = 0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": script_model.ROWS,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clip,
        "zero_optimization": zero,
    }
    if not cell.client:
        config["optimizer"] = {"type": "AdamW", "params": {**SETTINGS, "betas": list(SETTINGS["betas"])}}
    if cell.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if cell.split > 1:
        specs = [{"patterns": [r"\.up$"], "partition_type": "column"}, {"patterns": [r"\.down$"], "partition_type": "row"}]
        config["tensor_parallel"] = {"autotp_size": cell.split, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    if cell.stages > 1:
        config["pipeline"] = {"stages": cell.stages}
    if cell.sequences > 1 and cell.way != "ulysses":
        pairs = 2 if cell.way == "both" else 1
        strategy = "allgather" if cell.way == "both" else cell.way
        config["hf_zero"] = {"context_parallel_size": cell.sequences // pairs, "context_parallel_strategy": strategy}
        config["sequence_parallel_size"] = pairs
    if cell.experts > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": cell.experts}
    for section, settings in UNDER[cell.under][0].items():
        config[section] = {**config.get(section, {}), **settings}
    return config


class Zero(Side):
    """The engine's side; its methods are those of ``script_plain.Plain``, and show the same values.

    Args:
        cell: Settings under which the script runs.
        rank: This process's rank.
        folder: Folder of this script's checkpoints, the same on every rank.
    """

    def __init__(self, cell: Cell, rank: int, folder: Path) -> None:
        super().__init__(cell, rank)
        self.folder = folder
        parameters = list(self.model.parameters())
        self.client = torch.optim.AdamW(parameters, foreach=False, fused=False, **SETTINGS) if cell.client else None
        arguments: dict[str, Any] = {"optimizer": self.client} if cell.client else {"model_parameters": parameters}
        # Groups of both kinds come from the configuration; these make the forwards of a model forwards over slices.
        self.groups = sequences.register(self.model, cell.sequences) if cell.sequences > 1 and cell.way == "ulysses" else None
        self.engine: Any = hf_zero.initialize(model=self.model, config=config_of(cell), mpu=self.groups, **arguments)[0]
        self.loss: Tensor | None = None
        self.saves = 0

    def close(self) -> None:
        """Free everything, including files."""
        self.engine.destroy()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def loss_of(self, model: Any, data: int, place: int) -> Tensor:
        if self.groups is None:
            return super().loss_of(model, data, place)
        return sequences.loss_over_slices(model, data, place, self.groups)

    # -- training ---------------------------------------------------------------------------------------------------------

    def forward(self, data: int) -> Seen:
        self.loss = self.loss_of(self.engine, data, self.place)
        return {"loss": self.loss.detach().clone()}

    def backward(self) -> Seen:
        loss, self.loss = self.loss, None
        self.engine.backward(loss)
        return {}

    def step(self) -> Seen:
        self.engine.step()
        return {}

    # -- forwards ---------------------------------------------------------------------------------------------------------

    def evaluate(self, data: int) -> Seen:
        self.engine.eval()
        with torch.no_grad():
            logits = self.logits_of(self.engine, data)
        self.engine.train()
        return {"logits": logits.clone()}

    def infer(self, data: int) -> Seen:
        self.engine.eval()
        with torch.inference_mode():
            self.kept = self.logits_of(self.engine, data)
        self.engine.train()
        return {"logits": self.kept.clone()}

    def call_module(self, data: int) -> Seen:
        self.model.eval()
        with torch.no_grad():
            logits = self.logits_of(self.model, data)
        self.model.train()
        return {"logits": logits.clone()}

    def forward_lost(self, data: int) -> Seen:
        return {"loss": self.loss_of(self.engine, data, self.place).detach().clone()}

    def forward_more(self, data: int, how: str) -> Seen:
        self.loss = self.loss + self.loss_of(self.engine if how == "engine" else self.model, data, self.place)
        return {"loss": self.loss.detach().clone()}

    def peek(self, data: int) -> Seen:
        with torch.no_grad():
            return {"loss": self.loss_of(self.engine, data, self.place).clone()}

    def mode(self, to: str) -> Seen:
        self.engine.train(to == "train")
        return {}

    def generate(self, data: int, lengths: str) -> Seen:
        self.engine.eval()
        tokens, logits = self.engine.module.generate(self.prompt(data), length_of(lengths, self.place))
        self.engine.train()
        return {"tokens": tokens, **{f"logits {place}": value for place, value in enumerate(logits)}}

    # -- caught errors ------------------------------------------------------------------------------------------------------

    def fail_forward(self, layer: str, who: Any, data: int) -> Seen:
        if who in ("all", self.rank):
            self.model.get_submodule(layer).fails = "forward"
            try:
                self.loss_of(self.engine, data, self.place)
            except ScriptError:
                return {}
            raise AssertionError("the forward did not raise")
        return {}

    def fail_backward(self, layer: str, data: int) -> Seen:
        self.model.get_submodule(layer).fails = "backward"
        loss = self.loss_of(self.engine, data, self.place)
        try:
            self.engine.backward(loss)
        except ScriptError:
            self.engine.zero_grad()
            return {}
        raise AssertionError("the backward did not raise")

    def bad_save(self, who: Any, what: str) -> Seen:
        bad: Any = None if what == "none" else 3
        self.engine.save_checkpoint(bad if who in ("all", self.rank) else str(self.folder), tag="bad")
        return {}

    # -- files --------------------------------------------------------------------------------------------------------------

    def save(self) -> Seen:
        self.engine.save_checkpoint(str(self.folder), tag=f"tag{self.saves}")
        self.saves += 1
        return {}

    def load(self, which: str) -> Seen:
        path, _ = self.engine.load_checkpoint(str(self.folder), tag=None if which == "last" else "tag0")
        assert path is not None
        return {}

    def save_model(self) -> Seen:
        self.engine.save_16bit_model(str(self.folder / "model"))
        if self.rank:
            return {}
        found = load_file(self.folder / "model" / "model.safetensors")
        return {name: found[name] for name, _ in self.model.named_parameters()}

    def state_dict(self) -> Seen:
        found = self.engine._consolidated_16bit_state_dict()
        return {name: found[name].clone() for name, _ in self.model.named_parameters()} if self.rank == 0 else {}

    # -- what trains ----------------------------------------------------------------------------------------------------------

    def add_adapter(self, layer: str, how: str, trains: int) -> Seen:
        added = script_model.add_adapter(self.model, layer, self.dtype, bool(trains))
        if how == "group":
            (self.client or self.engine.optimizer).add_param_group({"params": added})
        return {}

    def remove_adapter(self, layer: str) -> Seen:
        del self.model.get_submodule(layer).adapter
        return {}

    # -- values ---------------------------------------------------------------------------------------------------------------

    def write(self, param: str, how: str) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        script_model.write(parameter, how, self._noise(param, parameter, 1))
        return {}

    def load_module(self, how: str) -> Seen:
        weights = {name: value.to(self.dtype) for name, value in new_weights(self.model).items()}
        if how == "engine":
            self.engine.load_module_state_dict(weights, strict=False)
        else:
            self.model.load_state_dict(weights, strict=False)
        return {}

    def gather_write(self, param: str, modifier: Any, who: Any) -> Seen:
        parameter = self.model.get_parameter(param)
        with hf_zero.zero.GatheredParameters([parameter], modifier_rank=None if modifier == "none" else modifier):
            if who in ("all", self.rank):
                parameter.data.copy_(self._noise(param, parameter, 2))
        return {}

    def average(self, how: str) -> Seen:
        named = dict(self.model.named_parameters())
        with hf_zero.zero.GatheredParameters(list(named.values())) if how == "gathered" else nullcontext():
            seen = self.average_of(named)
        return {key: whole_of(named[key.removeprefix("average of ")], value) for key, value in seen.items()}

    def average_in(self, how: str) -> Seen:
        named = dict(self.model.named_parameters())
        with hf_zero.zero.GatheredParameters(list(named.values()), modifier_rank=0) if how == "gathered" else nullcontext():
            return self.take_average(named)

    def swa(self, data: int) -> Seen:
        averaged = averaged_twice(self.engine.module).eval()
        with torch.no_grad():
            return {"logits": self.logits_of(averaged, data).clone()}

    def penalty(self, how: str, over: str) -> Seen:
        self.loss = self.loss + script_model.penalty(how, over, self.engine.module)
        return {"loss": self.loss.detach().clone()}

    def read(self, param: str, what: str, who: Any) -> Seen:
        if who in ("all", self.rank):
            script_model.read(what, self.engine.module, param)
        return {}

    # -- gradients and the optimizer ------------------------------------------------------------------------------------------

    def write_grad(self, param: str, who: Any) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        if who in ("all", self.rank):
            parameter.grad = self._noise(f"{param} {self.place}", parameter, 3).to(self.dtype)
        return {}

    def hook_grad(self, param: str) -> Seen:
        return self.scale_gradient(self.model.get_parameter(param))

    def clip_grads(self) -> Seen:
        return {"norm": torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)}

    def set_grad(self, param: str) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        utils.safe_set_full_grad(parameter, noise(param, script_model.shape_of(parameter), 4))
        return {}

    def get_grad(self, param: str) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        found = utils.safe_get_full_grad(parameter)
        return {"gradient": torch.zeros(script_model.shape_of(parameter)) if found is None else found.float()}

    def set_master(self, param: str) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        utils.safe_set_full_fp32_param(parameter, noise(param, script_model.shape_of(parameter), 5))
        return {}

    def get_master(self, param: str) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        found = utils.safe_get_full_fp32_param(parameter)
        if not parameter.requires_grad:
            return {}
        if found is None:  # nothing trains it before its first gradient: its master will begin with its value
            with hf_zero.zero.GatheredParameters([parameter]):
                found = parameter.detach().float()
        return {"master": found.clone()}

    def set_moments(self, param: str) -> Seen:
        parameter = self.model.get_parameter(param)
        if is_elsewhere(parameter):
            return {}
        for key, value in new_moments(param, script_model.shape_of(parameter)).items():
            utils.safe_set_full_optimizer_state(parameter, value, key)
        return {}

    def set_lr(self, lr: float) -> Seen:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        return {}

    def zero_grad(self, how: str) -> Seen:
        objects = {"engine": self.engine, "module": self.model, "optimizer": self.engine.optimizer, "client": self.client}
        (objects[how] if how in objects else self.model.get_submodule(how)).zero_grad()
        return {}

    # -- what is compared -------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return complete parameters by name; collective."""
        named = dict(self.model.named_parameters())
        with hf_zero.zero.GatheredParameters(list(named.values())):
            here = {name: parameter for name, parameter in named.items() if not is_elsewhere(parameter)}
            return {name: whole_of(parameter, parameter.detach().clone()) for name, parameter in here.items()}

    def masters(self) -> dict[str, Tensor]:
        """Return the complete masters of trained parameters, by name; collective."""
        found = {name: utils.safe_get_full_fp32_param(parameter) for name, parameter in self.model.named_parameters()}
        return {name: value.detach().float().clone() for name, value in found.items() if value is not None}

    def moments(self, key: str) -> dict[str, Tensor]:
        """Return one state of the optimizer by the parameter's name, for parameters that have it; collective."""
        found = {name: utils.safe_get_full_optimizer_state(parameter, key) for name, parameter in self.model.named_parameters()}
        return {name: value.detach().float().clone() for name, value in found.items() if value is not None}

    def buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers by name."""
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def _noise(self, name: str, parameter: Any, seed: int) -> Tensor:
        """Return this rank's part of values for ``parameter``."""
        return part_of(parameter, noise(name, script_model.shape_of(parameter), seed))

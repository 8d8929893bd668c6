"""Runs that save under one configuration and resume under others, drawn at random, compared with the same run in plain PyTorch.

By hand: ``python -m tests.checkpoint.drawn_resumes --count 30 --seed 1``; with ``--run "{...}"`` one that was printed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint.resume_options import Drawn, changed, draw, full
from tests.support import ranks
from tests.support.checkpoints import Sample, build, full_state
from tests.support.models import CLASSES, LENGTH, class_loss
from tests.support.parity import DTYPES, mean_over_ranks
from tests.trainer.drawn_runs import report

ROWS = 24
CLASS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-3}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-3}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "eps": 1e-2}),
    "nadam": (torch.optim.NAdam, {"eps": 1e-3}),
}
WARMUP = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 20}


def batch_of(step: int) -> dict[str, Tensor]:
    """Return all rows of an optimizer step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {"inputs": torch.randn(ROWS, LENGTH, generator=generator), "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def model_of(part: Drawn, seed: int) -> Sample:
    model = build(seed)
    if part["frozen"]:
        model.get_submodule(part["frozen"]).requires_grad_(False)
    return model


def groups_of(part: Drawn, model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups; a parameter has the same settings in every division."""
    trained = [param for param in model.parameters() if param.requires_grad]
    kinds = [
        ([p for p in trained if p.ndim > 1], {"weight_decay": 0.1, "lr": 0.01}),
        ([p for p in trained if p.ndim <= 1], {"weight_decay": 0.0, "lr": 0.03}),
    ]
    size = {"split": 3, "one each": 1}.get(part["groups"], 1000)
    made = [{"params": params[start : start + size], **options} for params, options in kinds for start in range(0, len(params), size)]
    return made[::-1] if part["groups"] == "reversed" else made


def optimizer_of(run: Drawn, part: Drawn, model: nn.Module, execution: bool) -> torch.optim.Optimizer:
    cls, options = CLASS[run["optimizer"]]
    more = {part["implementation"]: True} if execution and part["implementation"] else {}
    return cls(groups_of(part, model), lr=0.01, **options, **more)


def schedule(step: int) -> float:
    return max(0.1, 1.0 - 0.07 * step)


def scheduler_of(run: Drawn, optimizer: torch.optim.Optimizer) -> Any:
    from hf_zero.optim.schedules import WarmupLR

    if run["scheduler"] == "client":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    return WarmupLR(optimizer, **WARMUP)


# -- plain PyTorch -----------------------------------------------------------------------------------------------------


class Plain:
    """The same run in plain PyTorch: each part takes over values by parameter name."""

    def __init__(self, run: Drawn) -> None:
        self.run, self.step = run, 0
        self.names: dict[str, Any] = {}
        self.model: Any = None
        self.average: Any = None
        self.schedule_state: Any = None

    def begin(self, part: Drawn) -> None:
        before = self.model
        self.model = model_of(part, 0)
        optimizer = optimizer_of(self.run, part, self.model, False)
        scheduled = self.run["scheduler"] and part["scheduled"]
        self.scheduler = scheduler_of(self.run, optimizer) if scheduled else None
        if before is not None:
            self.model.load_state_dict(before.state_dict())
            for name, param in self.model.named_parameters():
                state = self.states.get(name)
                if state and param.requires_grad:
                    optimizer.state[param] = state
            if self.scheduler is not None and self.schedule_state is not None:
                own = {key: value for key, value in self.schedule_state.items() if key not in ("base_lrs", "lr_lambdas", "_last_lr")}
                self.scheduler.__dict__.update(own)
            by_param = {param: name for name, param in self.model.named_parameters()}
            for group in optimizer.param_groups:
                lrs = {self.lrs[by_param[param]] for param in group["params"] if by_param[param] in self.lrs}
                if lrs:
                    (group["lr"],) = lrs
        self.optimizer = optimizer
        if self.run["average"]:
            if self.average is None:
                self.average = {}
            else:  # a parameter that is trained only now starts from its loaded value
                self.average = {**{name: value.detach().clone() for name, value in self.averaged().items()}, **self.average}

    def end(self) -> None:
        by_param = {param: name for name, param in self.model.named_parameters()}
        self.states = {by_param[param]: state for param, state in self.optimizer.state.items()}
        self.lrs = {by_param[param]: group["lr"] for group in self.optimizer.param_groups for param in group["params"]}
        self.schedule_state = self.scheduler.state_dict() if self.scheduler is not None else None

    def train(self, part: Drawn, count: int) -> dict[str, Any]:
        seen: dict[str, Any] = {"loss": [], "norm": [], "lr": []}
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = class_loss(self.model, batch_of(self.step))
            loss.backward()
            grads = [param for param in self.model.parameters() if param.grad is not None]
            norm = nn.utils.clip_grad_norm_(grads, self.run["clip"] or 1e9)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.step += 1
            if self.average is not None:
                params = dict(self.model.named_parameters())
                for name in {*self.averaged(), *self.average}:
                    self.average.setdefault(name, params[name].detach().clone()).lerp_(params[name].detach(), 0.1)
            seen["loss"].append(loss.item())
            seen["norm"].append(float(norm))
            seen["lr"].append(lrs_by_name(self.model, self.optimizer))
        return {**seen, "state": self.full_state()}

    def averaged(self) -> dict[str, Tensor]:
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad and param.numel()}

    def full_state(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"weight {name}": param.detach().clone() for name, param in self.model.named_parameters()}
        names = {param: name for name, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.numel():
                    found[f"{key} {names[param]}"] = value.clone()
        for name in self.averaged() if self.average is not None else ():
            value = self.average[name]
            found[f"average {name}"] = value.clone()
        return found


def lrs_by_name(model: nn.Module, optimizer: Any, names: list[list[str]] | None = None) -> dict[str, float]:
    """Return the learning rate of each trained parameter."""
    if names is None:
        by_param = {param: name for name, param in model.named_parameters()}
        names = [[by_param[param] for param in group["params"]] for group in optimizer.param_groups]
    return {name: float(group["lr"]) for group, own in zip(optimizer.param_groups, names, strict=True) for name in own}


# -- the engine --------------------------------------------------------------------------------------------------------


def config_of(run: Drawn, part: Drawn, folder: Path) -> dict[str, Any]:
    micro = ROWS // part["ranks"] // part["accumulation"]
    zero: dict[str, Any] = {"stage": part["stage"], "stage3_param_persistence_threshold": 0 if part["whole"] else 100000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": part["accumulation"],
        "gradient_clipping": run["clip"],
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if part["precision"] != "fp32":
        config[part["precision"]] = {"enabled": True}
    if part["precision"] == "fp16":
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    if part["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
        if part["offload"] == "both":
            zero["offload_param"] = {"device": "cpu"}
        if part["offload"] == "nvme":
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    if run["scheduler"] == "config" and part["scheduled"]:
        config["scheduler"] = {"type": "WarmupLR", "params": WARMUP}
    if part["kind"] == "config":
        options = {"adamw": {"betas": [0.9, 0.98], "eps": 1e-3}, "sgd": {"momentum": 0.9}}[run["optimizer"]]
        config["optimizer"] = {"type": {"adamw": "AdamW", "sgd": "SGD"}[run["optimizer"]], "params": {"lr": 0.01, **options}}
    if part["save"] == "background":
        config["checkpoint"] = {"writer": {"decoupled": True}}
    return config


class Zero:
    """One part of the run, under hf_zero."""

    def __init__(self, run: Drawn, part: Drawn, folder: Path, seed: int) -> None:
        import hf_zero

        self.run, self.part = run, part
        model = model_of(part, seed)
        by_param = {param: name for name, param in model.named_parameters()}
        groups = groups_of(part, model)
        self.group_names = [[by_param[param] for param in group["params"]] for group in groups]
        given: dict[str, Any] = {"model_parameters": groups}
        if part["kind"] == "given":
            optimizer = optimizer_of(run, part, model, True)
            given = {"optimizer": optimizer}
            if run["scheduler"] == "client" and part["scheduled"]:
                given["lr_scheduler"] = scheduler_of(run, optimizer)
        self.engine, self.optimizer, _, self.scheduler = hf_zero.initialize(model=model, config=config_of(run, part, folder), **given)
        self.average = hf_zero.utils.AveragedWeights(self.engine, decay=run["average"]) if run["average"] else None

    def micro_step(self, step: int, index: int) -> float:
        part, dtype = self.part, DTYPES[self.part["precision"]]
        rows = ROWS // part["ranks"] // part["accumulation"]
        start = (index * part["ranks"] + ranks.rank()) * rows
        batch = {name: value[start : start + rows].to(ranks.device()) for name, value in batch_of(step).items()}
        batch["inputs"] = batch["inputs"].to(dtype)
        loss = class_loss(self.engine, batch)
        self.engine.backward(loss)
        return loss.item()

    def train(self, first: int, count: int) -> dict[str, Any]:
        seen: dict[str, Any] = {"loss": [], "norm": [], "lr": []}
        for step in range(first, first + count):
            losses = []
            for index in range(self.part["accumulation"]):
                losses.append(self.micro_step(step, index))
                self.engine.step()
            if self.average is not None:
                self.average.update()
            seen["loss"].append(mean_over_ranks(losses))
            seen["norm"].append(float(self.engine.get_global_grad_norm()))
            seen["lr"].append(lrs_by_name(self.engine.module, self.optimizer, self.group_names))
        return seen

    def full_state(self) -> dict[str, Any]:
        found = full_state(self.engine)
        if self.average is not None:
            for name, param in self.engine.module.named_parameters():
                if param.requires_grad and name != "nothing":
                    found[f"average {name}"] = self.average.whole(name).cpu().clone()
        return found


def part_of(run: Drawn, number: int, first: int, folder: Path) -> dict[str, Any]:
    """Resume part ``number``, train, save; return everything that a user sees."""
    part = run["parts"][number]
    base = number and run["parts"][number - 1]["save"] == "frozen left out"  # its frozen values are those of the model
    zero = Zero(run, part, folder, 0 if base else number)
    result: dict[str, Any] = {}
    if number:
        before = run["parts"][number - 1]
        place, tag = str(folder / f"saved{number - 1}"), "own" if before["save"] == "tag" else None
        if part["load"] == "trained on":
            zero.train(90, 2)
        if part["load"] == "in accumulation" and part["accumulation"] > 1:
            zero.micro_step(95, 0)
            zero.engine.step()
        for _ in range(2 if part["load"] == "twice" else 1):
            path, client = zero.engine.load_checkpoint(place, tag, load_module_strict=before["save"] != "frozen left out")
        assert path is not None and client == {"part": number - 1, "values": [torch.ones(1).item()]}, (path, client)
        assert zero.engine.global_steps == first, zero.engine.global_steps
        result["loaded"] = zero.full_state()
    result.update(zero.train(first, part["steps"]))
    result["state"] = zero.full_state()
    place = str(folder / f"saved{number}")
    if part["save"] == "twice":
        zero.engine.save_checkpoint(place, client_state={"other": 1})
    if part["save"] == "middle" and part["accumulation"] > 1:
        zero.micro_step(first + part["steps"], 0)
        zero.engine.step()
    zero.engine.save_checkpoint(
        place,
        "own" if part["save"] == "tag" else None,
        client_state={"part": number, "values": [1.0]},
        exclude_frozen_parameters=part["save"] == "frozen left out",
    )
    zero.engine.wait_for_checkpoint()
    zero.engine.destroy()
    return result


# -- comparison --------------------------------------------------------------------------------------------------------


def far(left: Any, right: Any, exact: bool, loose: bool) -> str:
    """Return how two values differ by more than rounding; empty if they do not."""
    if isinstance(left, dict):
        keys = sorted(left.keys() ^ right.keys())
        return (
            f"keys {keys}"
            if keys
            else "; ".join(f"{key}: {text}" for key in left if (text := far(left[key], right[key], exact, loose)))[:200]
        )
    one, other = torch.as_tensor(left, dtype=torch.float64), torch.as_tensor(right, dtype=torch.float64)
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)}, {tuple(other.shape)}"
    relative, absolute = (0.0, 0.0) if exact else (0.05, 0.03) if loose else (1e-3, 2e-5)
    return (
        ""
        if torch.allclose(one, other, rtol=relative, atol=absolute)
        else f"{left} and {right}"[:160]
        if one.ndim < 2
        else f"off by {float((one - other).abs().max()):.3g}"
    )


def compared(run: Drawn, folder: Path) -> list[str]:
    """Run all parts; return the differences."""
    plain, first, lines, last = Plain(run), 0, [], {}
    (folder / "nvme").mkdir()
    loose = False
    for number, part in enumerate(run["parts"]):
        try:
            found = ranks.run_ranks(part_of, part["ranks"], run, number, first, folder, timeout=60)
        except ranks.RankError as error:
            texts = [outcome.text.partition("\noutput of rank")[0].strip() for outcome in error.outcomes]
            said = [text.splitlines()[-1][:400] if text else "" for text in texts]
            return [*lines, *(f"part {number} raises: {text}" for text in sorted(set(said)))]
        one = found[0]
        for other in found[1:]:
            lines += [f"part {number}: rank differs in {name}" for name in ("loss", "norm", "lr") if other[name] != one[name]]
        plain.begin(part)
        expected = plain.train(part, part["steps"])
        loose = loose or part["precision"] != "fp32"
        for name in ("loss", "norm", "lr"):
            for index, pair in enumerate(zip(expected[name], one[name], strict=True)):
                if text := far(*pair, exact=False, loose=loose and name != "lr"):
                    lines.append(f"part {number} .{name}[{index}]: {text}")
        if not (loose and run["optimizer"] == "rmsprop"):  # which divides roundings of small gradients by their size
            lines += states_apart(expected["state"], one["state"], f"part {number} end", loose)
        if number:
            mine = {name: value for name, value in one["loaded"].items() if not name.startswith(("buffer seen", "group", "scheduler"))}
            for name in sorted(mine.keys() & last.keys()):
                same_type = run["parts"][number - 1]["precision"] == part["precision"]
                if (
                    isinstance(mine[name], Tensor)
                    and (same_type or not name.startswith(("weight", "buffer")))
                    and not torch.equal(mine[name], last[name])
                ):
                    lines.append(f"part {number} loaded {name} is not the saved one")
            if number and one["loaded"]["scaler"] != last["scaler"] and same_type:
                lines.append(f"part {number} scaler {last['scaler']} {one['loaded']['scaler']}")
        plain.end()
        last, first = one["state"], first + part["steps"]
    return lines


def states_apart(expected: dict[str, Any], found: dict[str, Any], where: str, loose: bool) -> list[str]:
    lines = []
    for name, value in expected.items():
        if name not in found:
            if name.split()[0] in ("weight", "exp_avg", "momentum_buffer", "average"):
                lines.append(f"{where}: no {name}")
        elif text := far(value, found[name].to(value.dtype), False, loose):
            lines.append(f"{where} {name}: {text}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks of a part")
    parser.add_argument("--run", help="options of one run, as they were printed")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    runs = [full(eval(given.run))] if given.run else [draw(random_, given.ranks) for _ in range(given.count)]  # noqa: S307
    report(runs, lambda run, _models, folder: compared(run, folder), changed, save_models=lambda _folder: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

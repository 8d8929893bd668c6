"""Optimizers of scripts, composed of features at random: under hf_zero they train as in plain PyTorch, or one error names the feature.

By hand: ``python -m tests.optim.drawn_optimizers --seeds 1 40``; with ``--run "{...}"`` one that was printed.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.optim.composed import RATE
from tests.optim.composed_kinds import make
from tests.optim.composed_options import Drawn, changed, draw, full, made_valid
from tests.support import ranks, trainers
from tests.trainer.drawn_runs import report

STEPS, ROWS = 5, 4
RESUMED = 3  # the step before which a run is saved


class Net(nn.Module):
    """A network with matrices, vectors, a scalar, a convolution, a frozen layer, and a layer that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.spare = nn.Linear(8, 8)
        self.kernel = nn.Conv1d(2, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(8, 2)

    def forward(self, rows: Tensor, leaves_out: bool = False) -> Tensor:
        hidden = self.first(rows)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if not leaves_out:
            hidden = hidden + torch.tanh(self.spare(hidden))
        hidden = self.kernel((hidden + self.frozen(hidden)).view(-1, 2, 4)).flatten(1)
        return self.out(hidden * self.scale)  # type: ignore[no-any-return]


def dtype_of(run: Drawn) -> torch.dtype:
    return torch.bfloat16 if run["precision"] == "bf16" else torch.float32


def loss_of(run: Drawn, model: Any, step: int, micro: int, rank: int) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    rows, wanted = torch.randn(ROWS, 6, generator=source), torch.randn(ROWS, 2, generator=source)
    leaves_out = run["skips"] == "first" and step < 2 or run["skips"] == "some" and step % 2 == 1
    return (model(rows.to(dtype_of(run)), leaves_out).float() - wanted).square().mean()


def named_of(run: Drawn, model: nn.Module, later: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the optimizer gets at first, or ``later``."""
    found = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [entry for entry in found if (run["loop"] == "add group" and entry[0].startswith("out.")) is later]


# -- one script --------------------------------------------------------------------------------------------------------


class Script:
    """A training script around a composed optimizer, and all that it sees."""

    def __init__(self, run: Drawn, folder: Path) -> None:
        self.run, self.folder = run, folder
        torch.manual_seed(7)
        self.model: Any = Net()
        self.losses: list[float] = []
        self.read: list[Any] = []
        self.scheduler: Any = None
        self.begin()

    def begin(self) -> None:
        """Make the optimizer, and prepare both."""
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.3 * step))

    def micro_step(self, step: int, micro: int) -> float:
        """Run forward and backward on every rank's rows; return the mean of the losses."""
        raise NotImplementedError

    def update(self, step: int) -> None:
        raise NotImplementedError

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.before(step)
            losses = [] if self.needs_closure() else [self.micro_step(step, micro) for micro in range(self.run["accumulation"])]
            self.between(step)
            self.update(step)
            self.losses += losses
            self.after(step)

    def clip(self) -> None:
        """Clip gradients, where the engine does not."""

    def needs_closure(self) -> bool:
        return self.run["loop"] == "closure" or self.run["methods"] == "closure first"

    def closure(self, step: int) -> Any:
        def call() -> float:
            self.optimizer.zero_grad()
            found = self.micro_step(step, 0)
            self.clip()
            self.losses.append(found)
            return found

        return call

    def before(self, step: int) -> None:
        """Do what scripts do before a forward."""
        kind = self.run["loop"] if step == 2 else None
        if kind == "freezes":
            self.model.out.bias.requires_grad_(False)
        if kind == "add group":
            self.optimizer.add_param_group({"params": [param for _, param in self.later()], "lr": RATE / 2})
        if kind == "clears state":
            self.own.state.clear()
        if kind == "appends":
            self.own.param_groups[0]["scale"] = 0.5
            self.own.param_groups[0]["note"] = "changed"
        if self.run["loop"] == "resets" and step == 1:
            self.kept = copy.deepcopy(self.own.state_dict())
        if self.run["loop"] == "resets" and step == 3:
            self.own.load_state_dict(self.kept)

    def later(self) -> list[tuple[str, nn.Parameter]]:
        return named_of(self.run, self.model, True)

    def between(self, step: int) -> None:
        """Do what scripts do between backward and step."""
        if self.run["loop"] == "walks groups":
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    param.data.mul_(0.99)

    def after(self, step: int) -> None:
        kind = self.run["loop"]
        if kind == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.8
        if kind == "flag" and step == 1:
            self.own.param_groups[-1]["scale"] = 2.0
        if self.scheduler is not None:
            self.scheduler.step()
        if kind == "reads state":
            self.read.append([float(self.own.state[param]["moment"].norm()) for _, param in named_of(self.run, self.model)])

    def seen(self) -> dict[str, Any]:
        """Return all that both sides see of their optimizer."""
        return {"options": self.options(), "attributes": self.attributes(), "read": self.read}

    def options(self) -> list[dict[str, Any]]:
        """Return the numbers and texts in the param groups."""
        return [
            {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str))} for group in self.own.param_groups
        ]

    def attributes(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self.own).items() if isinstance(value, (int, float, str)) and name[0] != "_"}
        counts = vars(self.own).get("counts")
        return found | {"counts": str(getattr(counts, "steps", counts))}


class Plain(Script):
    """The script in plain PyTorch: one process computes the mean over the ranks; 16-bit weights have fp32 masters."""

    def begin(self) -> None:
        self.model.to(dtype_of(self.run))
        self.masters = {
            name: nn.Parameter(param.detach().clone().float()) for name, param in self.model.named_parameters() if param.requires_grad
        }
        self.by_param = {param: self.masters[name] for name, param in self.model.named_parameters() if name in self.masters}
        self.own = self.optimizer = make(self.run, [(name, self.masters[name]) for name, _ in named_of(self.run, self.model)])
        if self.run["loop"] == "scheduler":
            self.scheduler = self.schedule(self.own)

    def later(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, self.masters[name]) for name, _ in super().later()]

    def after(self, step: int) -> None:
        if self.run["loop"] == "reads state":
            self.read.append([float(self.own.state[self.by_param[param]]["moment"].norm()) for _, param in named_of(self.run, self.model)])
            return
        super().after(step)

    def micro_step(self, step: int, micro: int) -> float:
        with torch.no_grad():
            for param, master in self.by_param.items():
                param.copy_(master)
        total = 0.0
        for rank in range(ranks.world()):
            with torch.enable_grad():
                loss = loss_of(self.run, self.model, step, micro, rank)
            (loss / self.run["accumulation"]).backward()
            total += loss.item() / ranks.world()
            for param, master in self.by_param.items():
                if param.requires_grad and param.grad is not None:
                    part = param.grad.float() / ranks.world()
                    master.grad = part if master.grad is None else master.grad + part
                param.grad = None
        return total

    def clip(self) -> None:
        if self.run["clip"]:
            torch.nn.utils.clip_grad_norm_([master for master in self.masters.values() if self.is_taken(master)], self.run["clip"])

    def update(self, step: int) -> None:
        self.clip()
        if self.needs_closure():
            self.own.step(self.closure(step))
        elif self.run["kind"] == "sam":
            first: Any = self.own
            first.first_step(zero_grad=True)
            self.micro_step(step, 0)
            first.second_step(zero_grad=True)
        else:
            self.own.step()
        for master in filter(self.is_taken, self.masters.values()):
            master.grad = None

    def is_taken(self, master: Tensor) -> bool:
        return any(master is param for group in self.own.param_groups for param in group["params"])

    def save(self) -> Any:
        return copy.deepcopy((self.own.state_dict(), self.masters, self.scheduler and self.scheduler.state_dict()))

    def load(self, kept: Any) -> None:
        state, masters, schedule = kept
        self.own.load_state_dict(state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(masters[name])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(schedule)

    def end(self) -> None:
        """Do nothing: there is no engine."""

    def ended(self) -> dict[str, Any]:
        state = {
            f"{name} {key}": value.detach().float()
            for name, master in self.masters.items()
            for key, value in dict(self.own.state.get(master, {})).items()
            if isinstance(value, Tensor) and value.shape == master.shape and value.is_floating_point()
        }
        weights = {name: master.detach().clone() for name, master in self.masters.items()}
        return {"weights": weights, "losses": self.losses, "state": state, **self.seen()}


def config_of(run: Drawn) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": run["stage"], "stage3_param_persistence_threshold": 0}
    if run["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    if run["offload"] == "small sub-groups":
        zero["sub_group_size"] = 40
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": run["accumulation"],
        "gradient_clipping": run["clip"],
        "zero_optimization": zero,
        "communication_data_type": "fp32",
    }
    if run["precision"] == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if run["offload"]:
        config["zero_force_ds_cpu_optimizer"] = False
    return config


class Zero(Script):
    """The script under hf_zero."""

    def begin(self) -> None:
        import hf_zero

        run = self.run
        self.own = make(run, named_of(run, self.model))
        if run["loop"] == "scheduler":
            self.scheduler = self.schedule(self.own)
        if run["api"] == "initialize":
            self.engine, self.optimizer, _, _ = hf_zero.initialize(model=self.model, optimizer=self.own, config=config_of(run))
            return
        from accelerate import Accelerator, DeepSpeedPlugin

        trainers.forget()
        config = config_of(run) | {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
        self.accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=run["accumulation"]
        )
        self.engine, self.optimizer = self.accelerator.prepare(self.model, self.own)

    def later(self) -> list[tuple[str, nn.Parameter]]:
        return named_of(self.run, self.engine.module, True)

    def micro_step(self, step: int, micro: int) -> float:
        if self.run["api"] == "accelerate":
            with self.accelerator.accumulate(self.engine):
                loss = loss_of(self.run, self.engine, step, micro, ranks.rank())
                self.accelerator.backward(loss)
                if micro + 1 < self.run["accumulation"]:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            return mean(loss)
        loss = loss_of(self.run, self.engine, step, micro, ranks.rank())
        self.engine.backward(loss)
        if micro + 1 < self.run["accumulation"]:
            self.engine.step()
        return mean(loss)

    def update(self, step: int) -> None:
        run = self.run
        own: Any = self.own
        if self.needs_closure():
            self.optimizer.step(self.closure(step))
        elif run["kind"] == "sam":
            own.first_step(zero_grad=True)
            self.micro_step(step, 0)
            own.second_step(zero_grad=True)
        elif run["loop"] == "own step":
            own.step()
        elif run["api"] == "accelerate":
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.step()

    def ended(self) -> dict[str, Any]:
        from hf_zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        named = [(name, param) for name, param in self.engine.module.named_parameters() if name in TRAINED]
        weights = {name: whole(safe_get_full_fp32_param(param), param) for name, param in named}
        state = {}
        for name, param in named:
            for key in ("moment", "square", "total", "before", "other", "slow", "exp_avg"):
                try:
                    found = safe_get_full_optimizer_state(param, key)
                except Exception:  # there is none
                    found = None
                if found is not None:
                    state[f"{name} {key}"] = found.detach().float().cpu()
        return {"weights": weights, "losses": self.losses, "state": state, **self.seen()}

    def end(self) -> None:
        if self.run["api"] == "accelerate":
            self.accelerator.end_training()
            self.accelerator.free_memory()
        self.engine.destroy()

    def save(self) -> Any:
        if self.run["resume"] == "state_dict":
            found = self.engine.optimizer.state_dict(), self.ended()["weights"], self.scheduler and self.scheduler.state_dict()
            return copy.deepcopy(found)
        if self.run["api"] == "accelerate":
            self.accelerator.save_state(str(self.folder / "state"))
        else:
            self.engine.save_checkpoint(str(self.folder / "state"))
        return self.scheduler and self.scheduler.state_dict()

    def load(self, kept: Any) -> None:
        import hf_zero

        schedule = kept
        if self.run["resume"] == "state_dict":
            state, weights, schedule = kept
            for name, param in self.engine.module.named_parameters():
                if name in TRAINED:
                    hf_zero.utils.safe_set_full_fp32_param(param, weights[name])
            self.engine.optimizer.load_state_dict(state)
        elif self.run["api"] == "accelerate":
            self.accelerator.load_state(str(self.folder / "state"))
        else:
            self.engine.load_checkpoint(str(self.folder / "state"))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(schedule)


TRAINED = {name for name, param in Net().named_parameters() if param.requires_grad}


def whole(value: Tensor | None, param: nn.Parameter) -> Tensor:
    if value is None:  # frozen, so it has no master
        import hf_zero

        with hf_zero.zero.GatheredParameters(param):
            value = param.detach().float()
    return value.detach().clone().cpu()


def mean(loss: Tensor) -> float:
    total = loss.detach().double().reshape(1)
    torch.distributed.all_reduce(total)
    return float(total) / ranks.world()


def trained(kind: type[Script], run: Drawn, folder: Path) -> dict[str, Any]:
    """Train, resume if the run says so, and return all that a user sees."""
    script: Any = kind(run, folder)
    script.train(0, RESUMED)
    if run["resume"] and not (kind is Plain and run["kind"]):  # an optimizer in another one is not in the other's state_dict
        kept, losses = script.save(), list(script.losses)
        if run["resume"] == "same engine":
            script.train(STEPS, STEPS + 1)
        else:
            script.end()
            script = kind(run, folder)
        script.load(kept)
        script.losses = losses
    script.train(RESUMED, STEPS)
    found: dict[str, Any] = script.ended()
    script.end()
    return found


# -- comparison --------------------------------------------------------------------------------------------------------


def apart(left: Any, right: Any, exact: bool, where: str = "") -> Iterator[str]:
    """Yield where two results differ by more than rounding; states may be missing on the right."""
    if isinstance(left, dict):
        for key in left.keys() | right.keys() if where != ".state" else left.keys() & right.keys():
            if key not in left or key not in right:
                yield f"{where}.{key}: only {'plain' if key in left else 'zero'}"
            else:
                yield from apart(left[key], right[key], exact, f"{where}.{key}")
    elif isinstance(left, list):
        if len(left) != len(right):
            yield f"{where}: {len(left)} and {len(right)} entries"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from apart(*pair, exact, f"{where}[{index}]")
    elif isinstance(left, Tensor):
        if left.shape != right.shape:
            yield f"{where}: shapes {tuple(left.shape)}, {tuple(right.shape)}"
        elif not torch.allclose(left, right, rtol=2e-3, atol=2e-4 if exact else 2e-2, equal_nan=True):
            yield f"{where}: off by {float((left - right).abs().max()):.3g}"
    elif isinstance(left, float) and isinstance(right, float):
        if abs(left - right) > (1e-3 if exact else 1e-2) * max(1.0, abs(left)):
            yield f"{where}: {left} and {right}"
    elif left != right:
        yield f"{where}: {left!r} and {right!r}"


def compared(run: Drawn, folder: Path) -> list[str]:
    """Train in plain PyTorch and under hf_zero inside ranks; return the differences, or an error."""
    from hf_zero.errors import HfZeroError

    try:
        plain = trained(Plain, run, folder)
    except Exception as error:
        return [f"plain raises: {type(error).__name__}: {error}"]
    with trainers.clean_state():
        try:
            zero = trained(Zero, run, folder)
        except HfZeroError as error:
            return [f"ONE RAISES: ZeRO: {type(error).__name__}: {error}"]
        except Exception as error:
            import traceback

            where = traceback.extract_tb(error.__traceback__)[-1]
            return [f"RAISES: {type(error).__name__}: {str(error)[:300]} ({where.filename.rsplit('/', 2)[-1]}:{where.lineno})"]
    return sorted(apart(plain, zero, run["precision"] == "fp32"))


def lines_of(run: Drawn, folder: Path) -> list[str]:
    """Return the differences on any rank; one line for an error that all ranks raise."""
    each = ranks.run_ranks(compared, 2, run, folder, timeout=60)
    if each[0] != each[1] and any(line.startswith(("ONE RAISES", "RAISES")) for one in each for line in one):
        return [f"ranks differ: {each[0][:1]} | {each[1][:1]}"]
    return sorted({line for one in each for line in one})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 20), help="first and last seed, one run each")
    parser.add_argument("--run", help="features of one run, as they were printed")
    parser.add_argument("--fixed", default="{}", help="features that all runs have")
    given = parser.parse_args()
    seeds = range(given.seeds[0], given.seeds[1] + 1)
    runs = [full(eval(given.run))] if given.run else [made_valid(draw(random.Random(seed)) | eval(given.fixed)) for seed in seeds]  # noqa: S307
    report(runs, lambda run, _models, folder: lines_of(run, folder), changed, save_models=lambda _folder: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

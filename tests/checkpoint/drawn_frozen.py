"""Runs that freeze, unfreeze, add and replace parts of a model in training, all that they write, and their loads, compared with PyTorch.

By hand: ``python -m tests.checkpoint.drawn_frozen --count 30 --seed 1``; with ``--run "{...}"`` one that was printed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.checkpoint.drawn_resumes import batch_of, far
from tests.support import ranks
from tests.support.models import CLASSES, LENGTH, Block, class_loss
from tests.support.parity import DTYPES, mean_over_ranks
from tests.trainer.drawn_runs import report

Drawn = dict[str, Any]
WIDTH, SAVED, MORE = 10, 3, 2
OPTIONS: dict[str, list[Any]] = {
    "stage": [3, 2, 1, 0],
    "ranks": [2, 1],
    "offload": [None, None, "optimizer", "both", "nvme"],
    "precision": ["fp32", "fp32", "bf16"],
    "optimizer": ["sgd", "adamw"],
    "frozen": ["blocks", "blocks.0", "entry", "head", "nothing", "all but head"],
    "given": ["all", "trained"],
    "first": ["unfreeze part", "unfreeze blocks.0", "unfreeze all", "freeze head", "freeze part", "replace head", "add layer", "none"],
    "second": ["none", "unfreeze all", "freeze blocks.0", "freeze part", "replace head", "remove layer", "refreeze"],
    "load": ["same", "start", "events", "save"],
    "what": ["all", "all", "module only", "no optimizer states"],
    "to stage": [3, 2, 1, 0],
    "to ranks": [2, 1],
}


class Model(nn.Module):
    """Blocks between an entry and two heads with tied weights, and room for a layer that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.extra: nn.Module | None = None
        self.head = nn.Linear(WIDTH, CLASSES)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.out.weight = self.head.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        if self.extra is not None:
            hidden = hidden + self.extra(hidden)
        return self.head(hidden) + self.out(hidden)


def model_of(run: Drawn, seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model()
    if run["frozen"] == "all but head":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    elif run["frozen"] != "nothing":
        model.get_submodule(run["frozen"]).requires_grad_(False)
    return model


def changes(run: Drawn, event: str, model: Model, like: Tensor) -> None:
    """Change the model as a script does."""
    verb, _, where = event.partition(" ")
    if verb == "none":
        return
    if verb == "refreeze":
        again = model_of(run, 0)
        frozen = {name for name, param in again.named_parameters() if not param.requires_grad}
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
    elif verb in ("unfreeze", "freeze"):
        part = model if where == "all" else None if where == "part" else model.get_submodule(where)
        for param in [model.blocks[0].down.weight] if part is None else part.parameters():  # type: ignore[union-attr]
            param.requires_grad_(verb == "unfreeze")
    elif verb in ("replace", "add"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            new = nn.Linear(WIDTH, CLASSES if verb == "replace" else WIDTH).to(like.device, like.dtype)
        setattr(model, "head" if verb == "replace" else "extra", new)
    elif verb == "remove":
        model.extra = None


def optimizer_of(run: Drawn, model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad or run["given"] == "all"]
    if run["optimizer"] == "sgd":
        return torch.optim.SGD(params, lr=0.2, momentum=0.9)
    return torch.optim.AdamW(params, lr=0.05, eps=1e-3)


class Side:
    """The run on one side: plain PyTorch, or an engine."""

    def __init__(self, run: Drawn, seed: int, changed: bool, config: Drawn | None = None) -> None:
        self.run, self.engine, self.step = run, None, 0
        self.model: Any = model_of(run, seed)
        if changed:
            self.apply("first", "second")
        self.optimizer: Any = optimizer_of(run, self.model)
        self.known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        self.kept = list(self.model.parameters())  # ids stay theirs
        if config is not None:
            import hf_zero

            self.engine, self.optimizer, *_ = hf_zero.initialize(model=self.model, optimizer=self.optimizer, config=config)

    def apply(self, *names: str) -> None:
        like = next(iter(self.model.parameters()))
        for name in names:
            changes(self.run, self.run[name], self.model, like)

    def change(self, *names: str) -> None:
        """Apply events, and give the optimizer the parameters that it does not know."""
        self.apply(*names)
        new = [param for param in self.model.parameters() if param.requires_grad and id(param) not in self.known]
        if new:
            self.known |= set(map(id, new))
            self.kept += new
            self.optimizer.add_param_group({"params": new})

    def train(self, count: int) -> list[float]:
        seen = []
        for step in range(self.step, self.step + count):
            batch = batch_of(step)
            if self.engine is None:
                self.optimizer.zero_grad()
                loss = class_loss(self.model, batch)
                loss.backward()
                self.optimizer.step()
                seen.append(loss.item())
                continue
            rows = len(batch["labels"]) // self.run["ranks"]
            own = slice(ranks.rank() * rows, (ranks.rank() + 1) * rows)
            mine = {"inputs": batch["inputs"][own].to(ranks.device(), DTYPES[self.run["precision"]]), "labels": batch["labels"][own]}
            loss = class_loss(self.engine, mine)
            self.engine.backward(loss)
            self.engine.step()
            seen.append(mean_over_ranks([loss.item()]))
        self.step += count
        return seen

    def until_save(self) -> list[float]:
        seen = self.train(1)
        self.change("first")
        seen += self.train(1)
        self.change("second")
        return seen + self.train(1)

    # -- plain

    def saved(self) -> dict[str, Any]:
        names = {param: name for name, param in self.model.named_parameters()}
        params = {name: value.clone() for name, value in self.model.state_dict().items()}
        states = {
            names[param]: {key: torch.as_tensor(value).clone() for key, value in state.items() if value is not None}
            for param, state in self.optimizer.state.items()
            if param in names
        }
        return {"params": params, "states": states}

    def load(self, saved: dict[str, Any], what: str) -> None:
        self.model.load_state_dict(saved["params"])
        if what != "all":
            return
        listed = {param for group in self.optimizer.param_groups for param in group["params"]}
        for name, param in self.model.named_parameters():
            self.optimizer.state.pop(param, None)
            state = saved["states"].get(name)
            if state and param in listed:
                self.optimizer.state[param] = {key: value.clone() for key, value in state.items()}


def config_of(run: Drawn, folder: Path) -> Drawn:
    zero: Drawn = {"stage": run["stage"], "stage3_param_persistence_threshold": 0}
    if run["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    if run["offload"] == "nvme":
        (folder / "nvme").mkdir(exist_ok=True)
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    if run["offload"] == "both" and run["stage"] == 3:
        zero["offload_param"] = {"device": "cpu"}
    config: Drawn = {
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 24 // run["ranks"],
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
    }
    if run["precision"] != "fp32":
        config[run["precision"]] = {"enabled": True}
    return config


def target_of(run: Drawn) -> Drawn:
    return {**run, "stage": run["to stage"], "ranks": run["to ranks"]}


def whole(engine: Any) -> dict[str, Tensor]:
    """Return all parameters as training uses them; collective."""
    import hf_zero

    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().float().cpu().clone() for name, value in engine.module.state_dict().items()}


def loads(side: Side, run: Drawn, folder: Path) -> None:
    options = {"module only": {"load_module_only": True}, "no optimizer states": {"load_optimizer_states": False}}.get(run["what"], {})
    path, _ = side.engine.load_checkpoint(str(folder / "saved"), **options)
    assert path is not None


def writes(run: Drawn, folder: Path) -> dict[str, Any]:
    """Train, write everything, and load into the same engine if that is asked for."""
    side = Side(run, 0, False, config_of(run, folder))
    found: dict[str, Any] = {"losses": side.until_save(), "trained": whole(side.engine)}
    engine = side.engine
    engine.save_checkpoint(str(folder / "saved"))
    engine.save_16bit_model(str(folder / "model"), "model.safetensors")
    state = engine._zero3_consolidated_16bit_state_dict() if run["stage"] == 3 else engine.module_state_dict()
    found["state dict"] = state and {name: value.float().clone() for name, value in state.items() if value.numel()}
    if run["load"] == "same":
        side.train(MORE)
        side.step = SAVED
        loads(side, run, folder)
        found |= {"loaded": whole(side.engine), "after": side.train(MORE), "last": whole(side.engine)}
    engine.destroy()
    return found


def resumes(run: Drawn, folder: Path) -> dict[str, Any]:
    """Load into a new engine and train on."""
    to = target_of(run)
    side = Side(to, 1, run["load"] == "save", config_of(to, folder))
    if run["load"] == "events":
        side.change("first", "second")
    loads(side, run, folder)
    found: dict[str, Any] = {"loaded": whole(side.engine)}
    if run["load"] == "start":
        side.change("first", "second")
    side.step = SAVED
    found |= {"after": side.train(MORE), "last": whole(side.engine)}
    side.engine.destroy()
    return found


def expected_of(run: Drawn) -> dict[str, Any]:
    side = Side(run, 0, False)
    found: dict[str, Any] = {"losses": side.until_save(), "trained": side.model.state_dict()}
    saved = side.saved()
    found["trained"] = saved["params"]
    if run["load"] == "same":
        side.train(MORE)
    else:
        side = Side(run, 1, run["load"] == "save")
        if run["load"] == "events":
            side.change("first", "second")
    side.load(saved, run["what"])
    found["loaded"] = side.saved()["params"]
    if run["load"] == "start":
        side.change("first", "second")
    side.step = SAVED
    return found | {"after": side.train(MORE), "last": side.saved()["params"]}


def written(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the weights in all that was written, as the tools read it."""
    from hf_zero.checkpoint.convert.run import Conversion, convert
    from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    convert(Conversion(folder / "saved", folder / "hf", to="hf", quiet=True))
    convert(Conversion(folder / "saved", folder / "again", to="hf_zero", tag="global_step3", quiet=True))
    return {
        "save_16bit_model": load_file(folder / "model" / "model.safetensors"),
        "zero_to_fp32": dict(get_fp32_state_dict_from_zero_checkpoint(str(folder / "saved"))),
        "convert": load_file(folder / "hf" / "model.safetensors"),
        "converted again": dict(get_fp32_state_dict_from_zero_checkpoint(str(folder / "again"))),
    }


def compared(run: Drawn, folder: Path) -> list[str]:
    loose, lines = run["precision"] != "fp32", []
    expected = expected_of(run)
    try:
        found = ranks.run_ranks(writes, run["ranks"], run, folder, timeout=60)[0]
        files = written(folder)
        if run["load"] != "same":
            found |= ranks.run_ranks(resumes, run["to ranks"], run, folder, timeout=60)[0]
    except ranks.RankError as error:
        texts = [outcome.text.partition("\noutput of rank")[0].strip() for outcome in error.outcomes]
        return [f"raises: {text}" for text in sorted({text.splitlines()[-1][:600] if text else "" for text in texts})]
    except Exception as error:
        return [f"reading raises: {type(error).__name__} {str(error)[-500:]}"]
    for name, values in files.items():
        tied = {key: value for key, value in expected["trained"].items() if key in values or key not in ("out.weight",)}
        if text := far(tied, {key: value.float() for key, value in values.items()}, False, loose):
            lines.append(f"{name}: {text}"[:300].replace("\n", " "))
    for name in ("losses", "trained", "loaded", "after", "last", "state dict"):
        wanted = expected["trained" if name == "state dict" else name]
        pairs = zip(wanted, found[name] or (), strict=False) if isinstance(wanted, list) else [(wanted, found[name])]
        for one, other in pairs:
            if other is not None and (text := far(one, other, False, loose)):
                lines.append(f"{name}: {text}"[:300].replace("\n", " "))
    return lines


def draw(random_: random.Random) -> Drawn:
    run = {name: random_.choice(values) for name, values in OPTIONS.items()}
    if run["second"] == "remove layer" and run["first"] != "add layer":
        run["second"] = "none"
    if run["frozen"] == "all but head" and run["first"] == "freeze head":  # nothing would be trained
        run["first"] = "none"
    structural = run["first"] == "add layer" and run["second"] != "remove layer"
    structural = structural or "replace head" in (run["first"], run["second"])  # which unties the heads
    if run["precision"] == "bf16":
        run["optimizer"] = "sgd"  # AdamW makes much of roundings of small gradients
    if run["load"] == "start" and structural:  # names of the checkpoint that the model lacks
        run["load"] = "events"
    if run["offload"] == "nvme" and any(run[key].split()[0] in ("freeze", "replace", "refreeze") for key in ("first", "second")):
        run["offload"] = "optimizer"  # states of one block share a file: its parts are not frozen
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", help="options of one run, as they were printed")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    runs = [eval(given.run)] if given.run else [draw(random_) for _ in range(given.count)]  # noqa: S307
    report(runs, lambda run, _models, folder: compared(run, folder), dict, save_models=lambda _folder: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

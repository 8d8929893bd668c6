"""The server of examples/rl in a thread of this process, for trainers in others; and a vLLM for TRL that sends to it over gloo.

TRL's client imports vLLM for the trainer's end of the weights' process group, which uses nccl there. ``vllm_over_gloo`` provides these
names: TRL's own code announces, iterates over the model's parameters and sends; vLLM's part (keeping the tensors of a message until it is
full) is done over gloo.
"""

from __future__ import annotations

import importlib
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load

from tests.support import examples

VERSION = "0.28.0"


@contextmanager
def serving(model: Any) -> Iterator[str]:
    """Serve ``model`` on a free port; yield the URL."""
    with examples.modules("rl", "server") as found:
        handler = type("Handler", (found.server.Handler,), {"served": found.server.Served(model, "toy")})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def weights_of(url: str) -> dict[str, torch.Tensor]:
    """Return the weights with which the server computes."""
    with urllib.request.urlopen(f"{url}/weights") as response:
        found: dict[str, torch.Tensor] = load(response.read())
    return found


def assert_has(url: str, expected: dict[str, torch.Tensor]) -> None:
    """Assert that the server's weights are ``expected``, bit for bit and no others."""
    found = weights_of(url)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@contextmanager
def vllm_over_gloo() -> Iterator[None]:
    """Make ``import vllm`` find the replacement, and TRL's GRPO use it on a CPU, inside the context."""
    from trl.generation import vllm_client, vllm_generation
    from trl.trainer import grpo_trainer

    original = grpo_trainer.VLLMGeneration
    with examples.modules("rl", "weight_group") as found, mock.patch.dict(sys.modules, _modules(found.weight_group)):
        importlib.reload(vllm_client)
        importlib.reload(vllm_generation)
        whole: Callable[..., None] = vllm_client.VLLMClient.init_communicator
        # The client refuses devices other than CUDA, and needs no more of one without an index.
        vllm_client.VLLMClient.init_communicator = lambda self, device: whole(self, "cuda")
        grpo_trainer.VLLMGeneration = vllm_generation.VLLMGeneration
        try:
            yield
        finally:
            grpo_trainer.VLLMGeneration = original
    importlib.reload(vllm_client)
    importlib.reload(vllm_generation)


def _modules(groups: ModuleType) -> dict[str, ModuleType]:
    """Return the modules of vLLM that TRL's client for a server imports, by name."""

    def join(init_info: dict[str, Any]) -> SimpleNamespace:
        group = groups.WeightGroup(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])
        return SimpleNamespace(group=SimpleNamespace(store=None, socket=None), weights=group)

    def send(iterator: Iterator[Any], group: SimpleNamespace, src: int, post_iter_func: Callable[[Any], torch.Tensor]) -> None:
        assert src == 0
        groups.send(group.weights, (("", post_iter_func(item)) for item in iterator))

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": VERSION, "LLM": None, "RequestOutput": None, "SamplingParams": None},
        "vllm.sampling_params": {"StructuredOutputsParams": None},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": join},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": send},
    }
    made = {}
    for name, content in contents.items():
        made[name] = ModuleType(name)
        made[name].__spec__ = ModuleSpec(name, None)
        made[name].__path__ = []
        vars(made[name]).update(content)
    return made

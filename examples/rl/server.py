"""Serve a Hugging Face model that generates text and receives new weights while it runs, with the part of vLLM's HTTP API that TRL uses.

    python examples/rl/server.py --model runs/start --port 8000

Use this server to try training with a server on a machine without GPU; it neither batches requests nor caches prompts. Use `vllm serve` on
GPUs. Weights arrive over a separate process group (`/init_weight_transfer_engine`, `/update_weights`, see weight_group.py) or in the body
of a request (`POST /weights`, safetensors); `GET /weights` returns the current weights.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from policy import load_policy
from safetensors.torch import load, save
from transformers import PreTrainedModel
from weight_group import WeightGroup, receive

JSON = "application/json"


class Served:
    """The model with one method per kind of request; requests run one at a time."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model.eval()
        self.name = name
        self._lock = threading.Lock()
        self._group: WeightGroup | None = None

    def health(self) -> dict[str, Any]:
        """Return an empty answer; clients call this until the server responds."""
        return {}

    def models(self) -> dict[str, Any]:
        """Return the list of models, which has one entry."""
        return {"object": "list", "data": [{"id": self.name, "object": "model"}]}

    def server_info(self) -> dict[str, Any]:
        """Return the settings that clients read before they send weights."""
        settings = {"weight_transfer_config": {"backend": "gloo"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
        return {"vllm_config": settings}

    def world_size(self) -> dict[str, Any]:
        """Return the number of server processes that receive weights, which is 1."""
        return {"world_size": 1}

    def join(self, body: dict[str, Any]) -> dict[str, Any]:
        """Join the process group for weights; the trainer listens at the address in ``body``."""
        info = body["init_info"]
        self._group = WeightGroup(info["master_address"], info["master_port"], info["rank_offset"], info["world_size"])
        return {}

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Receive the weights that ``body`` lists over the process group."""
        if self._group is None:
            raise ValueError("there is no process group: POST /init_weight_transfer_engine first")
        info = body["update_info"]
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        with self._lock:
            self._take(receive(self._group, list(zip(info["names"], dtypes, info["shapes"], strict=True))))
        return {}

    def take(self, body: bytes) -> dict[str, Any]:
        """Load the weights in ``body``, which is a safetensors file."""
        with self._lock:
            self._take(load(body).items())
        return {}

    def weights(self) -> bytes:
        """Return all weights as a safetensors file; a tied weight occurs once."""
        with self._lock:
            return save({name: param.detach().contiguous() for name, param in self.model.named_parameters()})

    def nothing(self, _: Any) -> dict[str, Any]:
        """Return success without doing anything, for requests about caches, which this server does not have."""
        return {"success": True}

    @torch.no_grad()
    def _take(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.model.named_parameters())
        for name, value in named:
            if name not in params or params[name].shape != value.shape:
                raise ValueError(f"the model has no weight {name} of shape {tuple(value.shape)}")
            params[name].copy_(value)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Generate completions of prompts, which are lists of tokens; return each with the log-probabilities of its sampled tokens."""
        prompts: list[list[int]] = body["prompt"]
        with self._lock:
            if "seed" in body:
                torch.manual_seed(body["seed"])
            tokens, scores = self._generate(prompts, body)
        choices = []
        for index, row in enumerate(tokens.tolist()):
            length = self._length(row)
            logprobs = [float(scores[step][index].log_softmax(-1)[row[step]]) for step in range(length)]
            named = {"tokens": [f"token_id:{token}" for token in row[:length]], "token_logprobs": logprobs, "top_logprobs": [None] * length}
            prompt = prompts[index // int(body.get("n", 1))]
            choices.append({"index": index, "prompt_token_ids": prompt, "token_ids": row[:length], "logprobs": named})
        return {"object": "text_completion", "model": self.name, "choices": choices}

    def _generate(self, prompts: list[list[int]], body: dict[str, Any]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        temperature = float(body.get("temperature", 1.0))
        sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
        sampling |= {name: body[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty") if body.get(name)}
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=int(body.get("max_tokens", 16)),
            num_return_sequences=int(body.get("n", 1)),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **({"top_k": 0} | sampling),
        )
        return found.sequences[:, longest:], found.scores

    def _length(self, row: list[int]) -> int:
        """Return the number of tokens up to and including the first end-of-text token."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return next((position + 1 for position, token in enumerate(row) if token in ends), len(row))


class Handler(BaseHTTPRequestHandler):
    """An HTTP handler that calls the method of ``Served`` for each request."""

    protocol_version = "HTTP/1.1"
    served: Served

    def do_GET(self) -> None:
        """Answer a GET request."""
        ways: dict[str, Callable[[], Any]] = {
            "/health": self.served.health,
            "/v1/models": self.served.models,
            "/server_info": self.served.server_info,
            "/get_world_size": self.served.world_size,
            "/weights": self.served.weights,
        }
        self._answer(ways.get(self.path.split("?")[0]))

    def do_POST(self) -> None:
        """Answer a POST request."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        ways: dict[str, Callable[[Any], Any]] = {
            "/v1/completions": self.served.complete,
            "/init_weight_transfer_engine": self.served.join,
            "/start_weight_update": self.served.nothing,
            "/update_weights": self.served.update,
            "/finish_weight_update": self.served.nothing,
            "/reset_prefix_cache": self.served.nothing,
            "/weights": self.served.take,
        }
        way = ways.get(self.path.split("?")[0])
        self._answer(way and (lambda: way(body if self.path == "/weights" else json.loads(body or b"{}"))))

    def _answer(self, call: Callable[[], Any] | None) -> None:
        status, given = 200, b""
        try:
            found: Any = {"error": f"no {self.path} here"} if call is None else call()
            status = 404 if call is None else 200
        except Exception as error:  # report the error to the client and keep serving
            found, status = {"error": f"{type(error).__name__}: {error}"}, 400
        given = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(found, bytes) else JSON)
        self.send_header("Content-Length", str(len(given)))
        self.end_headers()
        self.wfile.write(given)

    def log_message(self, *_: Any) -> None:
        """Do nothing, so that requests are not logged."""


def main() -> None:
    """Parse the command line and serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub name of the model.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on; 0 chooses a free one and prints it.")
    arguments = parser.parse_args()
    Handler.served = Served(load_policy(arguments.model), arguments.model)
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    print(f"serving {arguments.model} on http://{arguments.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

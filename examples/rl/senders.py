"""Send weights to a server in another process, over a process group of trainer and server or in the bodies of HTTP requests."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors.torch import save
from weight_group import PACK_BYTES, WeightGroup, send

SECONDS = 120


def post(url: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """Send a POST request and return the JSON of the response; raise ``HTTPError`` for an error status."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=sent, method="POST")  # noqa: S310 - the user's own server
    with urllib.request.urlopen(request, timeout=SECONDS) as response:  # noqa: S310
        found: dict[str, Any] = json.loads(response.read())
    return found


class OverGroup:
    """A sender that broadcasts weights over a process group of this process and the server.

    Args:
        server: URL of the server.
        bucket_bytes: Approximate number of bytes of tensors per ``update_weights`` request.
    """

    def __init__(self, server: str, bucket_bytes: int = PACK_BYTES) -> None:
        self._server, self._bucket_bytes = server, bucket_bytes
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as beside:  # the server responds after both processes have joined the group
            answer = beside.submit(post, f"{server}/init_weight_transfer_engine", {"init_info": info})
            self._group = WeightGroup("127.0.0.1", port, 0, 2)
            answer.result()

    def __call__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all (name, tensor) pairs of ``named`` to the server."""
        post(f"{self._server}/start_weight_update", {})
        with ThreadPoolExecutor(1) as beside:
            for bucket in buckets(named, self._bucket_bytes):
                names, values = zip(*bucket, strict=True)
                info = {"names": names, "dtype_names": [str(value.dtype).removeprefix("torch.") for value in values]}
                info |= {"shapes": [list(value.shape) for value in values]}
                answer = beside.submit(post, f"{self._server}/update_weights", {"update_info": info})
                send(self._group, bucket)
                answer.result()
        post(f"{self._server}/finish_weight_update", {})


class OverHttp:
    """A sender that puts weights into the bodies of HTTP requests, as safetensors.

    Args:
        server: URL of the server.
        bucket_bytes: Approximate number of bytes of tensors per request.
    """

    def __init__(self, server: str, bucket_bytes: int = PACK_BYTES) -> None:
        self._server, self._bucket_bytes = server, bucket_bytes

    def __call__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all (name, tensor) pairs of ``named`` to the server."""
        for bucket in buckets(named, self._bucket_bytes):
            post(f"{self._server}/weights", save({name: value.detach().cpu().contiguous() for name, value in bucket}))


SENDERS = {"gloo": OverGroup, "http": OverHttp}


def buckets(named: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Divide ``named`` into lists; a list ends as soon as its tensors have ``bucket_bytes`` bytes or more."""
    bucket: list[tuple[str, torch.Tensor]] = []
    for name, value in named:
        bucket.append((name, value))
        if sum(held.nbytes for _, held in bucket) >= bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket

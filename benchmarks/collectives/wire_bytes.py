"""Bytes that a rank sends in an optimizer step, by layout: the formulas of docs/scale.md, which tests compare with counted bytes.

python -m benchmarks.collectives.wire_bytes        # the tables of the page
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """How parameters, gradients and states are distributed.

    Attributes:
        name: Name on the page.
        stage: The ZeRO stage.
        shard: Number of ranks of a shard group; 0 means all ranks.
        node: Number of ranks that keep secondary copies together; 0 means no copies.
    """

    name: str
    stage: int
    shard: int = 0
    node: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole buffers that pass through the collectives of a step, by kind and size of the group.

    Attributes:
        gathers: Bytes of all-gathers, by ranks of the group.
        reductions: Bytes of reduce-scatters, by ranks of the group.
        all_reduces: Bytes of all-reduces, by ranks of the group.
    """

    gathers: dict[int, float]
    reductions: dict[int, float]
    all_reduces: dict[int, float]

    def sent(self) -> float:
        """Return the bytes that a rank sends: (n-1)/n of a buffer to gather or reduce-scatter it, twice that to all-reduce it."""
        once = sum((ranks - 1) / ranks * size for part in (self.gathers, self.reductions) for ranks, size in part.items())
        return once + sum(2 * (ranks - 1) / ranks * size for ranks, size in self.all_reduces.items())

    def leaves_node(self, node: int) -> float:
        """Return the bytes that leave a node of ``node`` adjacent ranks.

        For a group over several nodes these are all bytes but the node's own; for groups with one rank per node, the bytes of each rank.
        """
        once = sum(
            (ranks - node) / ranks * size for part in (self.gathers, self.reductions) for ranks, size in part.items() if ranks > node
        )
        return once + sum(2 * (ranks - 1) / ranks * size * node for ranks, size in self.all_reduces.items())


def traffic(layout: Layout, elements: float, world: int, micro_steps: int = 1, element_bytes: int = 2) -> Traffic:
    """Return the collectives of a step over units of ``elements`` in all, in ``element_bytes``; with more micro-steps replicas sum in fp32.

    Not included: votes and norms, some bytes per step, and that the root is gathered only once per micro-step.
    """
    group, whole = layout.shard or world, elements * element_bytes
    gathers = {group: whole}  # the all-gather of updates
    if layout.stage == 3:
        gathers = {group: 2 * micro_steps * whole}
        if layout.node:
            gathers = {world: whole, layout.node: (2 * micro_steps - 1) * whole}
    summed = 4 if micro_steps > 1 else element_bytes
    replicas = {world // group: elements * summed / group} if group < world else {}
    return Traffic(gathers, {group: micro_steps * whole}, replicas)


LAYOUTS = (
    Layout("stages 1 and 2", 1),
    Layout("stages 1 and 2, `mics_shard_size` 8", 1, shard=8),
    Layout("stage 3", 3),
    Layout("stage 3, `zero_hpz_partition_size` 8", 3, node=8),
    Layout("stage 3, `mics_shard_size` 8 (HSDP)", 3, shard=8),
    Layout("stage 3, `mics_shard_size` 64", 3, shard=64),
)


def tables(world: int = 4096, node: int = 8, rate: float = 400e9) -> str:
    """Return Markdown tables of bytes per step for models of 8 and 70 billion parameters in 16 bit."""
    lines = []
    for billions in (8, 70):
        lines += [f"**{billions} billion parameters**", ""]
        lines += [
            "| layout | a rank sends, GiB | leaves a node, GiB | at 400 GB/s, s | with 8 micro-steps: sends | leaves | s |",
            "|---" + "|---:" * 6 + "|",
        ]
        for layout in LAYOUTS:
            cells = []
            for micro_steps in (1, 8):
                found = traffic(layout, billions * 1e9, world, micro_steps)
                out = found.leaves_node(node)
                cells += [f"{found.sent() / GIB:.1f}", f"{out / GIB:.1f}", f"{out / rate:.2f}"]
            lines.append(f"| {layout.name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())

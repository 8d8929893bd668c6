"""Which heads a rank of a sequence-parallel group computes: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.errors import ConfigError


@dataclass(frozen=True)
class KeyHeads:
    """How key and value heads reach the ranks that hold the query heads.

    Attributes:
        sent: The key heads in the order they are sent, as many for each rank; None where that is the model's own order.
        queries_per_key: Query heads that read one key head, on every rank.
    """

    sent: tuple[int, ...] | None
    queries_per_key: int


def require_even_heads(heads: int, ranks: int, name: str = "num_attention_heads") -> None:
    """Each rank computes as many query heads as any other.

    Raises:
        ConfigError: ``ranks`` does not divide ``heads``.
    """
    if heads % ranks:
        usable = ", ".join(str(found) for found in range(1, heads + 1) if heads % found == 0)
        raise ConfigError(
            f"sequence parallelism over {ranks} ranks divides the {heads} attention heads of the model ({name}), which does not come out "
            f"even; sizes that do: {usable}"
        )


def key_heads(query_heads: int, key_heads: int, ranks: int) -> KeyHeads:
    """What each rank needs beside its ``query_heads / ranks`` query heads.

    With fewer key heads than ranks, or where a rank's query heads end in the middle of a group, a key head goes to several ranks.

    Args:
        query_heads: Query heads of the layer.
        key_heads: Key and value heads of the layer; they divide the query heads.
        ranks: Size of the sequence-parallel group.

    Raises:
        ConfigError: ``ranks`` does not divide ``query_heads``, or ``key_heads`` does not.
    """
    require_even_heads(query_heads, ranks)
    if query_heads % key_heads:
        raise ConfigError(f"{query_heads} query heads cannot share {key_heads} key heads evenly")
    own, group = query_heads // ranks, query_heads // key_heads
    if own % group == 0:
        return KeyHeads(None, group)
    if group % own == 0:
        return KeyHeads(tuple(rank * own // group for rank in range(ranks)), own)
    return KeyHeads(tuple(head // group for head in range(query_heads)), 1)

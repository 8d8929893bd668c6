"""The rows of a comms log as text."""

from __future__ import annotations

from hf_zero.comm.comms_log import CommsRow, size_text

_HEADS = ("operation", "ranks", "message", "count", "total ms", "average ms", "waited ms", "algbw Gbit/s", "busbw Gbit/s")
_STRAGGLER_HEADS = ("straggler ms", "last to arrive")


def table_text(rows: list[CommsRow]) -> str:
    """The rows as aligned columns; those of stragglers if ranks were compared."""
    compared = any(row.fastest is not None for row in rows)
    cells = [(*_HEADS, *(_STRAGGLER_HEADS if compared else ()))]
    for row in rows:
        kind, tally = row.kind, row.tally
        name = f"{kind.operation} ({kind.caller})" if kind.caller else kind.operation
        line = [name, str(kind.ranks), size_text(kind.nbytes), str(tally.count)]
        line += [f"{1e3 * value:.3f}" for value in (tally.seconds, row.average, tally.waited)]
        rates = (row.algorithm_bandwidth, row.bus_bandwidth)
        line += [f"{rate * 8e-9:.2f}" if kind.nbytes else "-" for rate in rates]
        if compared:
            line += [f"{1e3 * (tally.seconds - row.least):.3f}", f"rank {row.fastest}"]
        cells.append(tuple(line))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )

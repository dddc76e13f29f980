"""Output of the literature's formulas alone, for a number of parameters, on the terminal and as JSON.

Imports nothing heavy, so that it takes a tenth of a second.
"""

from dataclasses import asdict
from typing import Any

from zerobook.plan import formulas
from zerobook.plan.failures import FailurePlan
from zerobook.plan.hardware import Cluster
from zerobook.plan.literature import PaperFigures, paper_figures
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.table import size_or_dash, write_json
from zerobook.utils.units import count, gb, size


def show_formulas(parameters: int, cluster: Cluster, *, mixed: bool, target: str | None, failures: FailurePlan | None) -> None:
    """Print the papers' figures for a number of parameters under DDP and ZeRO's stages.

    Args:
        target: as in `write_json`.
    """
    # The formulas are the same for bf16 and fp16.
    precision = "no"
    kind = "fp32: 4-byte elements, K = 8"
    if mixed:
        precision = "bf16"
        kind = "mixed precision: 2-byte elements, K = 12"
    ranks: dict[str, Any] = {"ranks": cluster.ranks, "ranks_per_node": cluster.gpus}
    shardings = [
        ShardingSpec(kind="ddp", name="DDP", precision=precision, **ranks),
        ShardingSpec(kind="deepspeed", name="ZeRO-1", precision=precision, stage=1, **ranks),
        ShardingSpec(kind="deepspeed", name="ZeRO-2", precision=precision, stage=2, **ranks),
        ShardingSpec(kind="deepspeed", name="ZeRO-3", precision=precision, stage=3, shard_ranks=cluster.ranks, **ranks),
    ]
    figures = {}
    for sharding in shardings:
        figures[sharding.name] = paper_figures(parameters, parameters, sharding, cluster.nodes)
    checkpoint_bytes = formulas.CHECKPOINT_BYTES * parameters
    checkpoint_formula = f"{formulas.CHECKPOINT_BYTES} P bytes"

    if target:
        rows = [{"name": name, "total": row.states.total, **asdict(row)} for name, row in figures.items()]
        values = {
            "parameters": parameters,
            "hardware": asdict(cluster),
            "precision": "mixed" if mixed else "fp32",
            "unit": "bytes",
            "rows": rows,
            "checkpoint": {"bytes": checkpoint_bytes, "formula": checkpoint_formula},
        }
        if failures is not None:
            values["failures"] = asdict(failures)
        write_json(target, values)
    if target == "-":
        return

    print(
        f"{count(parameters)} parameters (P) on {cluster.name}: {cluster.ranks} GPUs ({kind}); GB are 10^9 bytes, "
        "without activations"
    )
    _print_states(figures)
    if cluster.ranks > 1:
        _print_traffic(figures, cluster)
    print(f"a checkpoint with optimizer state: {size(checkpoint_bytes)} = {checkpoint_formula}")
    if failures is not None:
        print(failures.describe())


def _print_states(figures: dict[str, PaperFigures]) -> None:
    print(f"{'':8}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'total':>10}{'of DDP':>8} a GPU, by formula")
    ddp_total = figures["DDP"].states.total
    for name, row in figures.items():
        states = row.states
        cells = f"{gb(states.parameters) + ' GB':>10}{gb(states.gradients) + ' GB':>11}"
        cells += f"{gb(states.optimizer) + ' GB':>11}{gb(states.total) + ' GB':>10}"
        fraction = f"1/{ddp_total / states.total:.3g}"
        print(f"{name:8}{cells}{fraction:>8} = {row.formula['states']}")


def _print_traffic(figures: dict[str, PaperFigures], cluster: Cluster) -> None:
    by_node = ", and by each node" if cluster.nodes > 1 else ""
    print(f"sent in a step by each rank, by the ring's law{by_node}:")
    for name, row in figures.items():
        line = f"{name:8}{size(row.sent):>10} = {row.formula['sent']}"
        if cluster.nodes > 1:
            line += f"; between nodes {size_or_dash(row.between)} as a ring"
        if row.rule is not None:
            line += f", {size(row.rule)} by the rule {row.formula['rule']}"
        print(line)

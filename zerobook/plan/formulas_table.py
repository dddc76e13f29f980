"""Output of the literature's formulas alone, for a number of parameters, on the terminal and as JSON.

Imports nothing heavy, so that it takes a tenth of a second.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

from zerobook.plan import formulas
from zerobook.plan.hardware import Cluster
from zerobook.plan.literature import PaperFigures, paper_figures
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.table import size_or_dash, write_json
from zerobook.utils.units import count, gb, size


class TransformerShape(NamedTuple):
    """The sizes of a transformer's activations."""

    layers: int
    batch: int
    length: int
    width: int

    def kept_bytes(self) -> dict[str, float]:
        """Return what is kept for the backward pass -> its bytes."""
        tensor_elements = self.layers * self.batch * self.length * self.width
        # Fused attention has no term of the heads.
        layers = formulas.activations(*self, heads=1, fused=True, checkpointing=False)
        recomputed = formulas.activations(*self, heads=1, fused=True, checkpointing=True)
        return {
            "one tensor of each layer, 2 bytes an element (its input: checkpointing)": 2.0 * tensor_elements,
            "one tensor of each layer, 4 bytes an element": 4.0 * tensor_elements,
            "everything, 2 bytes, fused attention (34 s b h a layer)": layers,
            "inputs of layers, and one layer recomputed, 2 bytes, fused attention": recomputed,
        }


def show_formulas(
    parameters: int,
    cluster: Cluster,
    *,
    mixed: bool,
    target: str | None,
    largest_layer: int | None,
    transformer: TransformerShape | None,
) -> None:
    """Print the papers' figures for a number of parameters under DDP and ZeRO's stages.

    Args:
        target: as in `write_json`.
        largest_layer: parameters of the largest layer, for DeepSpeed's estimates under ZeRO-3; None leaves them out.
        transformer: the sizes of a transformer's activations; None leaves them out.
    """
    figures = {}
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        sharding = ShardingSpec(
            kind="deepspeed" if stage else "ddp",
            name=name,
            ranks=cluster.ranks,
            ranks_per_node=cluster.gpus,
            stage=stage,
            shard_ranks=cluster.ranks if stage == 3 else 1,
            precision="bf16" if mixed else "no",
        )
        figures[name] = paper_figures(parameters, parameters, sharding, cluster.nodes)
    zero2 = formulas.deepspeed_zero2(parameters, cluster.gpus, cluster.nodes, offload=False)
    estimates = [("ZeRO-2, nothing offloaded", zero2)]
    if largest_layer is not None:
        estimates = formulas.deepspeed_rows(parameters, largest_layer, cluster.gpus, cluster.nodes)
    checkpoint_bytes = formulas.CHECKPOINT_BYTES * parameters
    checkpoint_formula = f"{formulas.CHECKPOINT_BYTES} P bytes"

    if target:
        rows = [{"name": name, "total": row.states.total, **asdict(row)} for name, row in figures.items()]
        values: dict[str, Any] = {
            "parameters": parameters,
            "hardware": asdict(cluster),
            "precision": "mixed" if mixed else "fp32",
            "unit": "bytes",
            "rows": rows,
            "deepspeed_zero2": zero2._asdict(),
            "checkpoint": {"bytes": checkpoint_bytes, "formula": checkpoint_formula},
        }
        if largest_layer is not None:
            values["deepspeed"] = [{"case": case, **estimate._asdict()} for case, estimate in estimates]
        if transformer is not None:
            values["activations"] = [{"what": name, "bytes": kept} for name, kept in transformer.kept_bytes().items()]
        write_json(target, values)
    if target == "-":
        return

    kind = "mixed precision: 2-byte elements, K = 12" if mixed else "fp32: 4-byte elements, K = 8"
    print(
        f"{count(parameters)} parameters (P) on {cluster.name}: {cluster.ranks} GPUs ({kind}); GB are 10^9 bytes, "
        "without activations"
    )
    _print_states(figures)
    if cluster.ranks > 1:
        _print_traffic(figures, cluster)
    print("DeepSpeed's estimator, in GiB of host RAM a node and memory a GPU; L are the parameters of the largest layer:")
    for case, estimate in estimates:
        print(f"{case:68}{estimate.host / 2**30:>9,.2f}{estimate.gpu / 2**30:>9,.2f} = {estimate.formula} bytes")
    if transformer is not None:
        print(
            f"activations of {transformer.layers} layers of {transformer.width}, "
            f"{transformer.batch} x {transformer.length} tokens:"
        )
        for name, kept in transformer.kept_bytes().items():
            print(f"{name:74}{gb(kept):>9} GB")
    print(f"a checkpoint with optimizer state: {size(checkpoint_bytes)} = {checkpoint_formula}")


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

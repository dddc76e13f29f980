"""Recommendation of a strategy file and flags, with the rule for each.

The rules come from practice and are tried in this order: changes that cost nothing, changes that cost time, changes of the
training itself, and offload last. The plan alone decides whether something fits, never a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerobook.errors import ConfigError
from zerobook.plan.hardware import Cluster
from zerobook.plan.rows import Row, Traced
from zerobook.utils.units import size

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig

SLOW_NETWORK = 100e9 / 8
"""Bytes a second between nodes below which sharding should stay inside a node: small clusters have 100 to 400 Gbps, and
from about 64 GPUs plain ZeRO-3 needs about 1000."""


WORTH = 0.9
"""Share of the fastest row's bytes between nodes. On a slow network, a row that sends less than this share is preferred."""


@dataclass(frozen=True)
class Advice:
    """A recommendation. ``row`` is the strategy to use, None where nothing fits. ``flags`` are to be added to the command,
    for the recipe ``recipe`` where it is another than the given one. ``reasons`` are pairs (rule, reason)."""

    row: Row | None
    flags: dict[str, Any]
    recipe: str | None
    reasons: list[tuple[str, str]]

    def words(self) -> str:
        """Return the strategy file and flags to launch with, and a line for each rule."""
        flags = "".join(f" --{key} {value}" for key, value in self.flags.items())
        recipe = f" recipes/{self.recipe}.py" if self.recipe else ""
        first = [f"recommended: accelerate_configs/{self.row.file}.yaml{recipe}{flags}"] if self.row is not None else []
        return "\n".join([*first, *(f"  {rule}: {reason}" for rule, reason in self.reasons)])

    def record(self) -> dict[str, Any]:
        """Return the recommendation as JSON values."""
        file = self.row.file if self.row is not None else None
        return {"strategy": file, "recipe": self.recipe, "flags": self.flags, "reasons": [list(pair) for pair in self.reasons]}


Replan = Callable[[dict[str, Any], str | None], tuple[Traced, list[Row]]]
LORA = "lora_finetune"


def recommend(traced: Traced, rows: list[Row], where: Cluster, replan: Replan) -> Advice:
    """Try one change after another until something fits.

    Args:
        replan: (flags to add, another recipe) -> the plan with them.
    """
    reasons = list(_always(traced, where))
    flags: dict[str, Any] = {}
    recipe, as_asked = None, rows

    def tried(rule: str, change: dict[str, Any]) -> bool:
        nonlocal traced, rows, flags, recipe
        more, other = flags | {key: value for key, value in change.items() if key != "recipe"}, change.get("recipe", recipe)
        try:
            traced, rows = replan(more, other)
        except ConfigError as error:  # the requested plan is still valid
            reasons.append((rule, f"could not be tried: {error.problems[0]}"))
            return False
        flags, recipe = more, other
        return True

    if (precision := _precision(traced, where)) and tried("half precision", precision):
        as_asked = rows
    rule = "evaluation in smaller batches"
    if _evaluation_is_too_large(rows) and tried(rule, {"per_device_eval_batch_size": 1}):
        reasons.append((rule, "with larger ones, the evaluation needs more of the GPU's memory than training"))
        as_asked = rows
    for step, change in _ladder(traced, where):
        if step is not None and not tried(step, change):
            continue
        fitting = [row for row in rows if row.fits and not offloads(row)]
        if fitting:
            best = preferred(traced, fitting, where, reasons)
            if step is not None:
                reasons.append((step, f"without it, or offload, nothing fits {where.name}"))
            if recipe is not None or "adapter" in flags:
                other = f"adapters alone are trained; to train all weights there is {_other(as_asked)}"
                reasons.append(("what LoRA leaves out", other))
            if recipe is not None:
                reasons.append(("in its recipe", "--max_seq_length takes the place of --block_size"))
            return Advice(best, flags, recipe, reasons + list(_about(best, traced.job.config, where)))
        if any(_lacks_another_thing(row) for row in rows):
            break  # saving GPU memory does not help
    offloading = [row for row in rows if row.fits]
    if offloading:
        reasons.append(("offload last", "nothing fits without it; accumulation was tried before it, since it costs less"))
        return Advice(offloading[0], flags, recipe, reasons + list(_about(offloading[0], traced.job.config, where)))
    reasons.append(("nothing fits", nearest_to_fitting(rows)))
    return Advice(None, flags, recipe, reasons)


def _evaluation_is_too_large(rows: list[Row]) -> bool:
    """Return whether nothing fits, and a row that exceeds its limits has its peak in the evaluation."""
    return not any(row.fits for row in rows) and any(row.over and row.memory.when == "evaluation" for row in rows if row.memory)


def _lacks_another_thing(row: Row) -> bool:
    """Return whether the row fits the GPU without offload, but exceeds the host RAM or the disk."""
    return bool(row.over) and not any(words.startswith("GPU memory") for words in row.over) and not offloads(row)


def nearest_to_fitting(rows: list[Row]) -> str:
    """Return what the row that is nearest to fitting lacks."""
    able = [row for row in rows if row.memory is not None]
    if not able:
        return f"no strategy file can run it; {rows[0].file}: {rows[0].problems[0]}"
    nearest = min(able, key=lambda row: (len(row.over), row.memory.total if row.memory else 0))
    return f"{nearest.file} comes nearest: {'; '.join(nearest.over)}. It wants {' or '.join(nearest.remedies)}"


def _other(rows: list[Row]) -> str:
    fitting = [row for row in rows if row.fits]
    return f"{fitting[0].file}, at {fitting[0].tokens_per_second:,.0f} tokens/s" if fitting else "no file that fits"


def _precision(traced: Traced, where: Cluster) -> dict[str, Any]:
    """Return the flag for the device's half precision, where no precision was given."""
    if where.cpu or traced.job.config.mixed_precision is not None:
        return {}
    return {"mixed_precision": "bf16" if where.device.bf16 else "fp16"}


def _always(traced: Traced, where: Cluster) -> Iterator[tuple[str, str]]:
    config = traced.job.config
    if not where.cpu and where.device.bf16 and config.mixed_precision != "bf16":
        yield "bf16", "--mixed_precision bf16: half the bytes, and no loss scale that can overflow"
    if not where.cpu and not where.device.bf16 and config.mixed_precision != "fp16":
        yield "fp16", f"--mixed_precision fp16: {where.device.name} has no bf16"
    if not traced.job.recipe.encoder_decoder and not config.packing and traced.job.shape.padded:
        yield "packing", "--packing: no time is spent on padding"
    if where.device.fused:
        yield "flash attention", "--attn_implementation auto takes it where the package is installed"


def _ladder(traced: Traced, where: Cluster) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield (rule, flags) in the order to try. The first changes nothing."""
    config = traced.job.config
    yield None, {}
    if config.activation_checkpointing not in ("full", "offload"):
        yield "activation checkpointing", {"activation_checkpointing": "full"}
    rows = config.per_device_train_batch_size
    if rows > 1:
        yield (
            "accumulation before offload",
            {"per_device_train_batch_size": 1}
            | ({} if config.global_batch_size else {"gradient_accumulation_steps": rows * config.gradient_accumulation_steps}),
        )
    if config.initialised_from:  # adapters need a trained base
        return
    adapters: dict[str, Any] = {}
    if not config.trains_adapters:
        adapters = {"dtype": "bfloat16" if where.device.bf16 else "float16"}
        if "adapter" in type(config).model_fields:
            adapters["adapter"] = "lora"
        else:
            adapters |= {"recipe": LORA, "max_seq_length": config.row_length}  # the other recipe's name for this flag
        yield "LoRA on all linear layers", adapters
    if config.base_format is None and not traced.job.recipe.encoder_decoder:
        # files without support for a quantised base, such as those with parameter offload, give rows that cannot run
        yield "QLoRA, where the strategy supports a quantised base", adapters | {"load_in_4bit": True}


def preferred(traced: Traced, fitting: list[Row], where: Cluster, reasons: list[tuple[str, str]]) -> Row:
    """Return the fastest row, unless a rule knows an effect that the roofline does not include."""
    slow = where.network is not None and where.network < SLOW_NETWORK
    best = fitting[0]
    inside = [row for row in fitting if _gathers_inside(row, where) and (row is best or row.between < WORTH * best.between)]
    if slow and inside:
        hpz = inside[0].spread is not None and inside[0].spread.secondary > 1
        how = "inside them, but for what a step has updated" if hpz else "inside them"
        rule = "hpZ on slow links" if hpz else "hybrid on slow links"
        reasons.append((rule, f"{size(where.network or 0)}/s between nodes: weights are gathered {how}"))
        return inside[0]
    sharded = [row for row in fitting if row.spread is not None and row.spread.kind == "deepspeed" and row.spread.stage == 3]
    if traced.job.config.trains_adapters and best.spread is not None and best.spread.stage == 3 and sharded:
        reasons.append(
            ("LoRA with bf16 and ZeRO-3 first", "adapters are small, and the frozen weights are what has to be shared")
        )
        best = sharded[0]
    if best.spread is not None and best.spread.stage == 3 and where.link <= where.device.pcie:
        others = [row for row in fitting if row.spread is not None and row.spread.stage < 3]
        if others:
            reasons.append(("ZeRO-3 wants fast links", f"{size(where.link)}/s inside the node: {others[0].name} gathers less"))
            return others[0]
    return best


def _gathers_inside(row: Row, where: Cluster) -> bool:
    """Return whether weights are sharded without being sent between nodes for every pass."""
    spread = row.spread
    if spread is None or spread.stage < 3:
        return False
    return spread.shard <= where.gpus or (spread.secondary > 1 and where.gpus % spread.secondary == 0)


def _about(best: Row, config: RecipeConfig, where: Cluster) -> Iterator[tuple[str, str]]:
    assert best.spread is not None and best.memory is not None
    if best.spread.stage in (1, 2) and where.host_memory and best.memory.host_at_load > 0.8 * where.host_memory:
        yield (
            "host RAM at load",
            f"every rank loads a whole copy: {size(best.memory.host_at_load)} of {size(where.host_memory)}",
        )
    if best.tight:
        yield "tight", f"{size(best.memory.total)} of {size(where.device.memory)} are planned; fragmentation may end the run"
    accumulation = config.accumulation_on(best.spread.ranks)
    samples = config.per_device_train_batch_size * accumulation * best.spread.ranks
    yield (
        "effective batch",
        f"{samples} samples a step at a learning rate of {config.learning_rate:g}. With another batch, Adam's rate changes "
        "with its square root (Malladi et al., arXiv 2205.10287), SGD's in proportion (Goyal et al., arXiv 1706.02677). Large "
        "models train at lower rates: 6e-4 for 125 million weights, 6e-5 for 175 billion (GPT-3, arXiv 2005.14165, table 2.1)",
    )


def offloads(row: Row) -> bool:
    """Return whether the strategy keeps weights or optimizer state outside of the GPU."""
    return row.spread is not None and (row.spread.offload_optimizer != "none" or row.spread.offload_param != "none")

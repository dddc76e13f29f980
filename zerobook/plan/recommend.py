"""Recommendation of a strategy file and flags, with the rule for each.

The rules come from practice and are tried in this order: changes that cost nothing, changes that cost time, changes of the
training itself, and offload last. The plan alone decides whether something fits, never a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerobook.errors import ConfigError
from zerobook.plan.hardware import Cluster
from zerobook.plan.rows import Row
from zerobook.plan.traced_job import TracedJob
from zerobook.utils.units import size

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig

SLOW_NETWORK = 100e9 / 8
"""Bytes a second between nodes below which sharding should stay inside a node: small clusters have 100 to 400 Gbps, and
from about 64 GPUs plain ZeRO-3 needs about 1000."""
LESS_TRAFFIC = 0.9
"""Share of the fastest row's bytes between nodes. On a slow network, a row that sends less than this share is preferred."""
LORA = "lora_finetune"

Reason = tuple[str, str]
"""(rule, reason)"""
Replan = Callable[[dict[str, Any], str | None], tuple[TracedJob, list[Row]]]
"""(flags to add, another recipe or None) -> the plan with them"""


@dataclass(frozen=True)
class Advice:
    """A recommendation: the strategy to use, None where nothing fits, and ``flags`` to be added to the command, for the recipe
    ``recipe`` where it is another than the one that was planned."""

    row: Row | None
    flags: dict[str, Any]
    recipe: str | None
    reasons: list[Reason]

    def describe(self) -> str:
        """Return the strategy file and flags to launch with, and a line for each rule."""
        lines = [f"  {rule}: {reason}" for rule, reason in self.reasons]
        if self.row is not None:
            command = f"accelerate_configs/{self.row.file}.yaml"
            if self.recipe:
                command += f" recipes/{self.recipe}.py"
            for key, value in self.flags.items():
                command += f" --{key} {value}"
            lines.insert(0, f"recommended: {command}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return the recommendation as JSON values."""
        return {
            "strategy": self.row.file if self.row is not None else None,
            "recipe": self.recipe,
            "flags": self.flags,
            "reasons": list(map(list, self.reasons)),
        }


@dataclass(frozen=True)
class _Change:
    """Flags that may make something fit, for another recipe where ``recipe`` names one."""

    rule: str
    flags: dict[str, Any]
    recipe: str | None = None


@dataclass
class _Search:
    """The plan with all changes so far."""

    traced: TracedJob
    rows: list[Row]
    replan: Replan
    flags: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    reasons: list[Reason] = field(default_factory=list)

    def apply(self, change: _Change) -> bool:
        """Plan with a change, and return whether that was possible. Otherwise the plan without it is still valid."""
        flags = self.flags | change.flags
        recipe = change.recipe or self.recipe
        try:
            self.traced, self.rows = self.replan(flags, recipe)
        except ConfigError as error:
            self.reasons.append((change.rule, f"could not be tried: {error.problems[0]}"))
            return False
        self.flags = flags
        self.recipe = recipe
        return True

    def advise(self, row: Row, cluster: Cluster) -> Advice:
        remarks = _remarks(row, self.traced.job.config, cluster)
        return Advice(row, self.flags, self.recipe, self.reasons + remarks)


def recommend(traced: TracedJob, rows: list[Row], cluster: Cluster, replan: Replan) -> Advice:
    """Try one change after another until something fits."""
    search = _Search(traced, rows, replan, reasons=_general_advice(traced, cluster))

    # Changes that cost nothing.
    if not cluster.cpu and traced.job.config.mixed_precision is None:
        search.apply(_Change("half precision", {"mixed_precision": cluster.half_precision}))
    if _evaluation_is_too_large(search.rows):
        smaller_batches = _Change("evaluation in smaller batches", {"per_device_eval_batch_size": 1})
        if search.apply(smaller_batches):
            reason = "with larger ones, the evaluation needs more of the GPU's memory than training"
            search.reasons.append((smaller_batches.rule, reason))
    all_weights_rows = search.rows

    # Changes that cost time, and changes of the training itself.
    changes: list[_Change | None] = [None]
    changes += _list_changes(search.traced, cluster)
    for change in changes:
        if change is not None and not search.apply(change):
            continue
        fitting = [row for row in search.rows if row.fits and not row.offloads]
        if fitting:
            best = prefer(search.traced, fitting, cluster, search.reasons)
            if change is not None:
                search.reasons.append((change.rule, f"without it, or offload, nothing fits {cluster.name}"))
            if search.recipe is not None or "adapter" in search.flags:
                reason = f"adapters alone are trained; to train all weights there is {_describe_best(all_weights_rows)}"
                search.reasons.append(("what LoRA leaves out", reason))
            if search.recipe is not None:
                search.reasons.append(("in its recipe", "--max_seq_length takes the place of --block_size"))
            return search.advise(best, cluster)
        if any(_exceeds_only_the_host(row) for row in search.rows):
            # Saving GPU memory does not help.
            break

    # Offload.
    offloading = [row for row in search.rows if row.fits]
    if offloading:
        reason = "nothing fits without it; accumulation was tried before it, since it costs less"
        search.reasons.append(("offload last", reason))
        return search.advise(offloading[0], cluster)
    search.reasons.append(("nothing fits", nearest_to_fitting(search.rows)))
    return Advice(None, search.flags, search.recipe, search.reasons)


def _evaluation_is_too_large(rows: list[Row]) -> bool:
    """Return whether nothing fits, and a row that exceeds its limits has its peak in the evaluation."""
    is_evaluation = False
    for row in rows:
        if row.fits:
            return False
        if row.over and row.memory is not None and row.memory.when == "evaluation":
            is_evaluation = True
    return is_evaluation


def _exceeds_only_the_host(row: Row) -> bool:
    """Return whether the row fits the GPU without offload, but exceeds the host RAM or the disk."""
    if not row.over or row.offloads:
        return False
    return not any(limit.startswith("GPU memory") for limit in row.over)


def nearest_to_fitting(rows: list[Row]) -> str:
    """Return what the row that is nearest to fitting lacks."""
    planned = [row for row in rows if row.memory is not None]
    if not planned:
        return f"no strategy file can run it; {rows[0].file}: {rows[0].problems[0]}"

    def lack(row: Row) -> tuple[int, int]:
        assert row.memory is not None
        return len(row.over), row.memory.total

    nearest = min(planned, key=lack)
    return f"{nearest.file} comes nearest: {'; '.join(nearest.over)}. It wants {' or '.join(nearest.remedies)}"


def _describe_best(rows: list[Row]) -> str:
    for row in rows:
        if row.fits:
            return f"{row.file}, at {row.tokens_per_second:,.0f} tokens/s"
    return "no file that fits"


def _general_advice(traced: TracedJob, cluster: Cluster) -> list[Reason]:
    """Return advice that holds whatever fits."""
    config = traced.job.config
    reasons = []
    if not cluster.cpu and cluster.device.bf16 and config.mixed_precision != "bf16":
        reasons.append(("bf16", "--mixed_precision bf16: half the bytes, and no loss scale that can overflow"))
    if not cluster.cpu and not cluster.device.bf16 and config.mixed_precision != "fp16":
        reasons.append(("fp16", f"--mixed_precision fp16: {cluster.device.name} has no bf16"))
    if not traced.job.recipe.encoder_decoder and not config.packing and traced.job.shape.padded:
        reasons.append(("packing", "--packing: no time is spent on padding"))
    if cluster.device.fused:
        reasons.append(("flash attention", "--attn_implementation auto takes it where the package is installed"))
    return reasons


def _list_changes(traced: TracedJob, cluster: Cluster) -> list[_Change]:
    """Return the changes in the order to try."""
    config = traced.job.config
    changes = []
    if config.activation_checkpointing not in ("full", "offload"):
        changes.append(_Change("activation checkpointing", {"activation_checkpointing": "full"}))
    rows = config.per_device_train_batch_size
    if rows > 1:
        flags: dict[str, Any] = {"per_device_train_batch_size": 1}
        # With a global batch, the accumulation follows from it.
        if not config.global_batch_size:
            flags["gradient_accumulation_steps"] = rows * config.gradient_accumulation_steps
        changes.append(_Change("accumulation before offload", flags))
    # Adapters need a trained base.
    if config.initialised_from:
        return changes
    adapter_flags: dict[str, Any] = {}
    adapter_recipe = None
    if not config.trains_adapters:
        # A frozen base needs no fp32 weights.
        adapter_flags["dtype"] = "bfloat16" if cluster.device.bf16 else "float16"
        if "adapter" in type(config).model_fields:
            adapter_flags["adapter"] = "lora"
        else:
            # The other recipe has another name for the length of a row.
            adapter_recipe = LORA
            adapter_flags["max_seq_length"] = config.row_length
        changes.append(_Change("LoRA on all linear layers", adapter_flags, adapter_recipe))
    if config.base_format is None and not traced.job.recipe.encoder_decoder:
        # Files without support for a quantised base, such as those with parameter offload, give rows that cannot run.
        rule = "QLoRA, where the strategy supports a quantised base"
        changes.append(_Change(rule, adapter_flags | {"load_in_4bit": True}, adapter_recipe))
    return changes


def prefer(traced: TracedJob, fitting: list[Row], cluster: Cluster, reasons: list[Reason]) -> Row:
    """Return the fastest row, unless a rule knows an effect that the roofline does not include; then add its reason."""
    best = fitting[0]
    # One process has nothing to share, and no published run shows that DeepSpeed's casts save it time.
    alone = [row for row in fitting if row.file == "single"]
    if cluster.ranks == 1 and alone:
        return alone[0]
    if cluster.network is not None and cluster.network < SLOW_NETWORK:
        for row in fitting:
            sends_less = row is best or row.between < LESS_TRAFFIC * best.between
            if sends_less and _gathers_within_node(row, cluster):
                reasons.append(_reason_for_slow_network(row, cluster.network))
                return row
    # With adapters, nearly all weights are frozen, and ZeRO-3 shards those too.
    zero3 = [row for row in fitting if row.sharding is not None and row.sharding.is_zero3]
    if traced.job.config.trains_adapters and _is_sharded(best) and zero3:
        reason = "adapters are small, and the frozen weights are what has to be shared"
        reasons.append(("LoRA with bf16 and ZeRO-3 first", reason))
        best = zero3[0]
    # Where links are no faster than PCIe, gathering weights for every pass costs more than the roofline says.
    if _is_sharded(best) and cluster.link <= cluster.device.pcie:
        for row in fitting:
            if not _is_sharded(row):
                reason = f"{size(cluster.link)}/s inside the node: {row.name} gathers less"
                reasons.append(("ZeRO-3 wants fast links", reason))
                return row
    return best


def _is_sharded(row: Row) -> bool:
    """Return whether the strategy shards the weights."""
    return row.sharding is not None and row.sharding.stage == 3


def _gathers_within_node(row: Row, cluster: Cluster) -> bool:
    """Return whether weights are sharded without being sent between nodes for every pass."""
    sharding = row.sharding
    if sharding is None or sharding.stage < 3:
        return False
    second_copy_is_near = sharding.secondary_ranks > 1 and cluster.gpus % sharding.secondary_ranks == 0
    return sharding.shard_ranks <= cluster.gpus or second_copy_is_near


def _reason_for_slow_network(row: Row, network: float) -> Reason:
    rule = "hybrid on slow links"
    location = "inside them"
    if row.sharding is not None and row.sharding.secondary_ranks > 1:
        rule = "hpZ on slow links"
        location += ", but for what a step has updated"
    return rule, f"{size(network)}/s between nodes: weights are gathered {location}"


def _remarks(row: Row, config: RecipeConfig, cluster: Cluster) -> list[Reason]:
    """Return what is to be known about the recommended row."""
    assert row.sharding is not None and row.memory is not None
    remarks = []
    at_load = row.memory.host_at_load
    if row.sharding.stage in (1, 2) and cluster.host_memory and at_load > 0.8 * cluster.host_memory:
        reason = f"every rank loads a whole copy: {size(at_load)} of {size(cluster.host_memory)}"
        remarks.append(("host RAM at load", reason))
    if row.tight:
        reason = f"{size(row.memory.total)} of {size(cluster.device.memory)} are planned; fragmentation may end the run"
        remarks.append(("tight", reason))
    samples = config.per_device_train_batch_size * config.accumulation_on(row.sharding.ranks) * row.sharding.ranks
    reason = (
        f"{samples} samples a step at a learning rate of {config.learning_rate:g}. With another batch, Adam's rate changes "
        "with its square root (Malladi et al., arXiv 2205.10287), SGD's in proportion (Goyal et al., arXiv 1706.02677). Large "
        "models train at lower rates: 6e-4 for 125 million weights, 6e-5 for 175 billion (GPT-3, arXiv 2005.14165, table 2.1)"
    )
    remarks.append(("effective batch", reason))
    return remarks

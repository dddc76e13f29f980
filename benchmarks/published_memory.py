"""Compare planned peaks of memory with published runs, for docs/measured/plan_accuracy.md.

usage: published_memory.py [--only TEXT] [--cache FOLDER]

Each row of ``benchmarks/published_runs.jsonl`` that names a peak, or says whether a run fitted its GPU, is planned as it ran.
Programs print different counters: what torch allocated, what its allocator reserved, or what the driver shows. Each is compared
with the planned figure of that counter. A trace is kept in ``--cache`` until the planner's code changes, so a run that was
stopped continues where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import published_programs  # noqa: E402
from benchmarks.published_programs import traced_as_it_ran  # noqa: E402
from benchmarks.published_runs import (  # noqa: E402
    PAGE,
    RUNS,
    WIDE_MISS,
    PublishedRun,
    UnplannedRunError,
    _percent,
    _quantiles,
    _table,
    peer_table,
    resolve_run,
    spread,
)
from zerobook.errors import ConfigError  # noqa: E402
from zerobook.plan import job as job_module  # noqa: E402
from zerobook.plan import memory as memory_module  # noqa: E402
from zerobook.plan import repetition  # noqa: E402
from zerobook.plan import trace as trace_module  # noqa: E402
from zerobook.plan.job import Job  # noqa: E402
from zerobook.plan.memory import CONTEXT_BYTES, NCCL_BYTES, DeviceBytes, PeakMemory, peak_memory  # noqa: E402
from zerobook.plan.sharding import ShardingSpec  # noqa: E402
from zerobook.plan.state_bytes import ModelWeights, Weight, cast_bytes  # noqa: E402
from zerobook.plan.trace import TimelinePoint, Trace  # noqa: E402
from zerobook.plan.traced_job import trace_job  # noqa: E402
from zerobook.utils.replaced import replaced  # noqa: E402
from zerobook.utils.versions import versions  # noqa: E402

CACHE = Path(tempfile.gettempdir()) / "zerobook_published_memory"
TRACED = ("saved", "layers", "loss", "loss_chunks")
"""Differences of a program that change its trace, see `benchmarks.published_programs`."""


@dataclass(frozen=True)
class MemoryComparison:
    """A run with its planned peak. ``published`` are bytes of ``counter``; None if only ``ran`` is known. ``chunked`` is the
    peak with the loss of `zerobook.head`, where it was asked for."""

    run: PublishedRun
    memory: PeakMemory
    capacity: int
    counter: str
    published: float | None
    ran: bool
    chunked: PeakMemory | None = None

    @property
    def planned(self) -> int:
        """Planned bytes of the counter that was published."""
        device = self.memory.device
        return {"allocated": device.allocated, "reserved": device.reserved, "driver": device.total}[self.counter]

    @property
    def ratio(self) -> float:
        assert self.published is not None
        return self.planned / self.published

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def verdict(self) -> str:
        """Whether the run fits its GPU by its range: yes, tight or no."""
        if self.memory.low > self.capacity:
            return "no"
        return "tight" if self.memory.high > self.capacity else "yes"

    @property
    def shares_states(self) -> bool:
        """Whether several ranks share states, whose buffers leave more gaps in the allocator's blocks."""
        facts = self.run.facts
        return facts["nodes"] * facts["gpus_per_node"] > 1 and facts["strategy"] != "ddp"

    @property
    def has_planned_gaps(self) -> bool:
        """Whether the allocator's gaps are planned as a share of what is allocated, and count in what was published."""
        return self.counter != "allocated" and "whole_model_at_load" not in self.run.facts.get("memory", {})

    def with_gaps(self, cached_share: float) -> MemoryComparison:
        """Return the comparison with another share of cached bytes."""
        device = self.memory.device
        device = replace(device, cached=round(cached_share * device.allocated))
        return replace(self, memory=replace(self.memory, device=device))


def read_memory_runs(file: Path = RUNS) -> list[PublishedRun]:
    """Return the runs that have a peak, or of which it is known whether they fitted."""
    runs = []
    for line in file.read_text().splitlines():
        run = PublishedRun(json.loads(line))
        measured = run.facts["measured"]
        if "peak_gb" in measured or "peak_gib" in measured or "fits" in measured:
            runs.append(run)
    # The quickest to trace first.
    return sorted(runs, key=lambda run: (run.facts["seq_len"] > 65536, run.facts["params_b"]))


def published_bytes(run: PublishedRun) -> float | None:
    """Return the published peak of one GPU."""
    measured = run.facts["measured"]
    if "peak_gib" in measured:
        return measured["peak_gib"] * 2**30
    return measured["peak_gb"] * 1e9 if "peak_gb" in measured else None


def read_counter(run: PublishedRun) -> str:
    """Return what a run's peak counts: ``allocated``, ``reserved`` or ``driver``."""
    counter = run.facts["measured"].get("counter", "driver")
    for name in ("allocated", "reserved"):
        if name in counter:
            return name
    return "driver"


class MemoryPlanner:
    """Plans the memory of runs. Traces are kept in a folder."""

    def __init__(self, cache: Path = CACHE, *, with_chunked_loss: bool = False):
        """
        Args:
            with_chunked_loss: also plan each run with the loss of `zerobook.head`, which holds few logits at once.
        """
        self._cache = cache
        self._with_chunked_loss = with_chunked_loss
        modules = (trace_module, job_module, repetition)
        code = [Path(module.__file__ or "").read_bytes() for module in modules]
        self._code = hashlib.sha256(b"".join(code) + repr(versions()).encode()).hexdigest()

    def compare(self, run: PublishedRun) -> MemoryComparison:
        """Plan one run.

        Raises:
            UnplannedRunError: no recipe or strategy file does what it did.
        """
        facts = run.facts
        # Compiled layers and operations that are recomputed selectively exclude each other here, and not in other programs.
        traced = facts | {"compile": False}
        if "saved" in facts.get("memory", {}):
            traced["activation_checkpointing"] = "selective"
        if "inputs_on_host" in facts.get("memory", {}):
            traced["activation_checkpointing"] = "offload"
        where = run.cluster()
        job, plan, sharding, model = resolve_run(PublishedRun(traced), where)
        # A program's own loss takes the logits of all tokens, in whatever way it computes with them.
        if "loss" in facts.get("memory", {}):
            job = replace(job, whole_logits=True)
        accumulation = job.config.accumulation_steps_on(plan.data_parallel_size)
        memory = self._plan(run, job, sharding, model, accumulation)
        chunked = None
        if self._with_chunked_loss:
            chunked = memory
            if job.whole_logits:
                chunked = self._plan(run, replace(job, whole_logits=False), sharding, model, accumulation)
        ran = facts["measured"].get("fits", True)
        return MemoryComparison(run, memory, where.device.memory, read_counter(run), published_bytes(run), ran, chunked)

    def _plan(self, run: PublishedRun, job: Job, sharding: ShardingSpec, model: ModelWeights, accumulation: int) -> PeakMemory:
        """Return the peak of a run as its program ran it."""
        facts = run.facts
        trace = self._trace(run, job, sharding)
        sharding = replace(sharding, **facts.get("deepspeed_elements", {}))
        model = _shard_as_it_did(model, sharding, facts.get("memory", {}))
        in_half = facts["trained_weights"].startswith("bf16")
        model, sharding, trace = _keep_dtype(model, sharding, trace, in_half)
        ranks_per_node = sharding.ranks_per_node
        # These programs shard a quantised base while they load it.
        with replaced(memory_module, "_quantised_load", lambda *_: DeviceBytes()):
            memory = peak_memory(model, sharding, trace, accumulation=accumulation, gpus_per_node=ranks_per_node)
        return _add_what_the_program_keeps(memory, model, sharding, facts)

    def _trace(self, run: PublishedRun, job: Job, sharding: ShardingSpec) -> Trace:
        """Return the timeline of a micro-batch's activations."""
        cast = sharding.cast
        autocast = sharding.autocast
        # Programs that keep all weights in half precision use no autocast.
        if run.facts["trained_weights"].startswith("bf16") and sharding.precision != "no":
            cast = "bf16"
            autocast = "no"
        settings = job.config.model_dump_json(exclude={"model_name_or_path", "gradient_accumulation_steps"})
        config = job.model_config.to_json_string(use_diff=False)
        key = f"{self._code} {settings} {config} {cast} {autocast} {job.whole_logits}"
        program = run.facts.get("memory", {})
        differences = {name: program[name] for name in TRACED if name in program}
        if differences:
            code = Path(published_programs.__file__).read_text()
            key = f"{key} {differences} {run.facts['compile']} {code}"
        file = self._cache / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        if not file.exists():
            with traced_as_it_ran(run.facts):
                trace = trace_job(job, cast, autocast, "cuda")
            self._cache.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"timeline": trace.timeline, "host_bytes": trace.host_bytes}))
        facts = json.loads(file.read_text())
        return Trace(0, [TimelinePoint(*point) for point in facts["timeline"]], host_bytes=facts["host_bytes"])


def _keep_dtype(
    model: ModelWeights, sharding: ShardingSpec, trace: Trace, in_half: bool
) -> tuple[ModelWeights, ShardingSpec, Trace]:
    """Return what has the bytes of a program that keeps trained weights, gradients and moments in two bytes each.

    The planner counts four bytes for a number of each, so half as many numbers have these bytes.

    Args:
        in_half: all trained weights are kept in two bytes; otherwise those that were loaded so.
    """
    sharding_in_half = replace(sharding, precision="no") if in_half and sharding.kind != "deepspeed" else sharding

    def shrink(weight: Weight) -> Weight:
        if not weight.trained or (not in_half and weight.element_bytes == 4):
            return weight
        first, *others = weight.shape
        return replace(weight, shape=(-(-first // 2), *others), element_bytes=4)

    weights = [shrink(weight) for weight in model.weights]
    shrunk = dict(zip((weight.name for weight in model.weights), weights, strict=True))
    groups = [[shrunk[weight.name] for weight in group] for group in model.groups]
    result = ModelWeights(weights, groups)
    share = result.trained_elements / max(model.trained_elements, 1)
    timeline = [TimelinePoint(int(point.gradient_elements * share), point.activation_bytes) for point in trace.timeline]
    return result, sharding_in_half, replace(trace, timeline=timeline)


def _shard_as_it_did(model: ModelWeights, sharding: ShardingSpec, program: dict[str, Any]) -> ModelWeights:
    """Return the weights in the units that the program gathers, with the scales that one rank holds of them."""

    def adapt(weight: Weight) -> Weight:
        if program.get("shards_scales"):
            weight = replace(weight, scale_bytes=weight.scale_bytes // sharding.ranks)
        if program.get("shards_embeddings") and not weight.unit:
            weight = replace(weight, unit=weight.name)
        return weight

    groups = [[adapt(weight) for weight in group] for group in model.groups]
    return ModelWeights([adapt(weight) for weight in model.weights], groups)


def _add_what_the_program_keeps(
    memory: PeakMemory, model: ModelWeights, sharding: ShardingSpec, facts: dict[str, Any]
) -> PeakMemory:
    """Return the peak of a program that keeps more than a plan counts, see `benchmarks.published_programs`."""
    program = facts.get("memory", {})
    device = memory.device
    weight_bytes = [weight.numel * cast_bytes(weight, sharding) for weight in model.weights]
    if program.get("copies_gathered"):
        device = replace(device, buffers=device.buffers + max(weight_bytes))
    if program.get("whole_model_at_load"):
        reserved = max(device.allocated + device.cached, sum(weight_bytes))
        # The blocks of the layers' weights stay reserved. Larger tensors do not fit into them, and come on top.
        layer_bytes = [weight.numel * cast_bytes(weight, sharding) for weight in model.weights if weight.unit]
        hidden_bytes = facts["seq_len"] * facts["micro_batch"] * facts["arch"]["hidden_size"] * sharding.compute_bytes
        if hidden_bytes > max(layer_bytes):
            reserved = max(reserved, sum(layer_bytes) + device.activations)
        device = replace(device, cached=reserved - device.allocated)
    other = device.other
    if "context_gb" in program:
        other += int(program["context_gb"] * 1e9) - CONTEXT_BYTES
    if "communicators" in program:
        other += (program["communicators"] - 1) * NCCL_BYTES
    device = replace(device, other=other)
    scale = device.total / memory.total
    return replace(memory, device=device, low=int(scale * memory.low), high=int(scale * memory.high))


INTRODUCTION = """
Written by `python benchmarks/published_memory.py`. Each run whose source names its peak, or says whether it fitted, is
planned with its own settings. Its peak is compared with the planned figure of the same counter: `allocated`, `reserved`, or
`driver`. If a source does not name its counter, the row says which one is assumed. Errors are |planned / published - 1|, as
median / 90th percentile. The ratio is the median of planned / published. None of these runs was repeated here.

The bytes that a plan counts have no fitted constant. The bytes that torch's allocator caches are planned as a share of them,
the median of these runs. If a source is left out, the shares are those of all other sources. In the row of the chunked loss,
all runs are planned with the loss of Zerobook's recipes, instead of the loss of each program.

If a program keeps other tensors than Zerobook, its runs are planned in that way, and their key `caveats` names the code that
shows it: saved products, fused layers, copies of logits or of gathered weights, sizes of buckets, weights that are on each GPU
before they are sharded. The code of a source was read only if its runs were far off. With the plan of a Zerobook recipe that
keeps all logits, all runs were off by 9% / 43%. Expect this error for a program whose code nobody has read.
"""
GROUPS: dict[str, Callable[[MemoryComparison], str]] = {
    "source": lambda comparison: comparison.run.source,
    "counter": lambda comparison: comparison.counter,
    "GPU": lambda comparison: comparison.run.facts["plan_gpu"],
    "strategy": lambda comparison: comparison.run.facts["strategy"],
    "method": lambda comparison: comparison.run.facts["method"]["kind"],
}
"""Heading -> what runs are grouped by."""
VERDICTS = ("yes", "tight", "no")


def memory_section(comparisons: Sequence[MemoryComparison], unplanned: Sequence[tuple[PublishedRun, str]]) -> str:
    """Return the page's section about memory as Markdown."""
    with_peak = [comparison for comparison in comparisons if comparison.published is not None]
    lines = ["## Memory", "", *INTRODUCTION.strip().splitlines(), ""]
    kinds = {
        "sources weighted alike": with_peak,
        "sources weighted alike, each left out in turn": leave_sources_out(with_peak),
        "with the chunked loss of Zerobook's recipes": with_chunked_loss(with_peak),
    }
    overall = []
    for name, members in kinds.items():
        if members:
            overall.append([name, str(len(members)), _percent(spread(members)), _ratio(members)])
    lines += _table(["", "runs", "error", "ratio"], overall)
    for heading, group_of in GROUPS.items():
        groups = defaultdict(list)
        for comparison in with_peak:
            groups[group_of(comparison)].append(comparison)
        rows = []
        for name, members in sorted(groups.items()):
            errors = _quantiles([member.error for member in members])
            rows.append([name, str(len(members)), _percent(errors), _ratio(members)])
        lines += _table([heading, "runs", "error", "ratio"], rows)

    lines += ["### Beside another program", ""]
    lines += peer_table(with_peak, "memory_gb", lambda comparison: comparison.published / 1e9)

    lines += [
        "### Does it fit?",
        "",
        "A planned peak has [a range](../guides/plan.md#where-the-figures-come-from). *yes*: the GPU has more memory than the",
        "upper end of the range. *no*: it has less than the lower end. *tight*: its memory is within the range.",
        "",
    ]
    rows = []
    for name, ran in (("ran", True), ("ran out of memory", False)):
        of_kind = [comparison.verdict for comparison in comparisons if comparison.ran is ran]
        rows.append([name, *(str(of_kind.count(verdict)) for verdict in VERDICTS)])
    lines += _table(["run", *(f"planned {verdict}" for verdict in VERDICTS)], rows)

    lines += [f"### Peaks more than {WIDE_MISS:.0%} off", ""]
    rows = []
    for miss in sorted(with_peak, key=lambda comparison: -comparison.error):
        if miss.error <= WIDE_MISS:
            continue
        facts = miss.run.facts
        what = f"{facts['model']}, {facts['method']['kind']}, {facts['seq_len']} x {facts['micro_batch']}"
        where = f"{facts['nodes']} x {facts['gpus_per_node']} {facts['plan_gpu']}, {facts['strategy']}"
        published = f"{miss.published / 1e9:.1f}" if miss.published is not None else ""
        figures = published, f"{miss.planned / 1e9:.1f}", f"{miss.ratio:.2f}"
        rows.append([facts["id"], what, where, *figures, miss.counter, _cause(facts)])
    lines += _table(["run", "training", "GPUs", "published, GB", "planned, GB", "ratio", "counter", "probable cause"], rows)
    lines += ["### Peaks that were not planned", ""]
    lines += _table(["run", "reason"], [[run.facts["id"], reason] for run, reason in unplanned])
    return "\n".join(lines)


def with_chunked_loss(comparisons: Sequence[MemoryComparison]) -> list[MemoryComparison]:
    """Return the comparisons that were also planned with our loss, with that peak."""
    planned = []
    for comparison in comparisons:
        if comparison.chunked is not None:
            planned.append(replace(comparison, memory=comparison.chunked))
    return planned


def leave_sources_out(comparisons: Sequence[MemoryComparison]) -> list[MemoryComparison]:
    """Return each comparison with the shares of cached bytes that the runs of all other sources have."""
    left_out = []
    for source in sorted({comparison.run.source for comparison in comparisons}):
        others = [comparison for comparison in comparisons if comparison.run.source != source]
        shares = {shares_states: cached_share(others, shares_states=shares_states) for shares_states in (False, True)}
        for comparison in comparisons:
            if comparison.run.source != source:
                continue
            if comparison.has_planned_gaps:
                comparison = comparison.with_gaps(shares[comparison.shares_states])
            left_out.append(comparison)
    return left_out


def cached_share(comparisons: Sequence[MemoryComparison], *, shares_states: bool) -> float:
    """Return the median of the cached bytes for each byte that is allocated, as published peaks imply them. Each source has
    the same weight."""
    by_source = defaultdict(list)
    for comparison in comparisons:
        if comparison.has_planned_gaps and comparison.shares_states is shares_states and comparison.published is not None:
            device = comparison.memory.device
            outside = device.other if comparison.counter == "driver" else 0
            by_source[comparison.run.source].append((comparison.published - outside) / device.allocated - 1)
    weighted = []
    for shares in by_source.values():
        weighted += [(share, 1 / len(shares) / len(by_source)) for share in shares]
    total = 0.0
    for share, weight in sorted(weighted):
        total += weight
        if total >= 0.5 - 1e-9:
            return max(share, 0.0)
    return 0.0


def _cause(facts: dict[str, Any]) -> str:
    """Return the probable cause of a large distance; "not known" if there is none."""
    if facts["attention"].startswith("megatron"):
        return "Megatron-DeepSpeed of 2021 holds 2 to 4 GB more than its code explains: not known"
    if facts["method"].get("quant") == "gptq-int4":
        return "base: GPTQ, planned as NF4"
    if facts["plannable"] != "yes":
        return facts["plannable"].removeprefix("approx: ")
    return "not known"


def _ratio(comparisons: Sequence[MemoryComparison]) -> str:
    return f"{statistics.median(comparison.ratio for comparison in comparisons):.2f}"


def append_section(page: Path, comparisons: Sequence[MemoryComparison], unplanned: Sequence[tuple[PublishedRun, str]]) -> None:
    """Put the section at the end of the page, in place of an earlier one."""
    text = page.read_text() if page.exists() else ""
    before = text.partition("\n## Memory\n")[0].rstrip("\n")
    page.write_text(f"{before}\n\n{memory_section(comparisons, unplanned)}")


def compare_all(planner: MemoryPlanner, only: str = "") -> tuple[list[MemoryComparison], list[tuple[PublishedRun, str]]]:
    """Plan the runs whose id contains ``only``. Return the comparisons, and the runs that cannot be planned with the reason."""
    comparisons = []
    unplanned = []
    for run in read_memory_runs():
        if only not in run.facts["id"]:
            continue
        try:
            comparison = planner.compare(run)
        except (UnplannedRunError, ConfigError) as error:
            unplanned.append((run, str(error)))
            continue
        comparisons.append(comparison)
        ratio = "" if comparison.published is None else f"{comparison.ratio:.2f}"
        print(f"{run.facts['id']:<24} {comparison.verdict:<6} {ratio}", flush=True)
    return comparisons, unplanned


def main() -> None:
    """Plan the runs, and write the section into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose id contains this; the page is left as it is")
    parser.add_argument("--cache", type=Path, default=CACHE, help="the folder in which traces are kept")
    flags = parser.parse_args()
    comparisons, unplanned = compare_all(MemoryPlanner(flags.cache, with_chunked_loss=not flags.only), flags.only)
    if not flags.only:
        append_section(PAGE, comparisons, unplanned)
    with_peak = [comparison for comparison in comparisons if comparison.published is not None]
    if not with_peak:
        sys.exit(f"--only {flags.only}: no run that can be planned has this in its id and a published peak.")
    print(f"sources weighted alike: {_percent(spread(with_peak))}")
    for shares_states in (False, True):
        print(f"cached share, shared states {shares_states}: {cached_share(with_peak, shares_states=shares_states):.3f}")


if __name__ == "__main__":
    main()

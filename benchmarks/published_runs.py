"""Compare planned times with published runs of other projects, and write docs/measured/plan_accuracy.md.

usage: published_runs.py [--only SOURCE] [--page FILE]

``benchmarks/published_runs.jsonl`` has a measurement a line, with its source. Each is planned as it ran: its model, strategy,
GPUs and micro-batch, with all logits at once where that program keeps them. Nothing is downloaded and nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fit_times import GENERATIONS, Fit, fit  # noqa: E402
from zerobook.config_sources import ConfigSources  # noqa: E402
from zerobook.errors import ConfigError  # noqa: E402
from zerobook.plan import roofline  # noqa: E402
from zerobook.plan.gather_schedule import Gathers, follow_gathers  # noqa: E402
from zerobook.plan.hardware import Cluster, cluster  # noqa: E402
from zerobook.plan.job import Job, make_job  # noqa: E402
from zerobook.plan.roofline import StepSeconds, step_seconds  # noqa: E402
from zerobook.plan.rows import resolve_launch_plan  # noqa: E402
from zerobook.plan.sharding import ShardingSpec, sharding_spec  # noqa: E402
from zerobook.plan.state_bytes import ModelWeights  # noqa: E402
from zerobook.plan.traced_job import trace_job  # noqa: E402
from zerobook.plan.traffic import Transfer, list_transfers  # noqa: E402
from zerobook.plan.work import Work  # noqa: E402
from zerobook.strategy.launch_plan import LaunchPlan  # noqa: E402
from zerobook.training.recipe_file import recipe_class  # noqa: E402
from zerobook.utils.devices import DEVICES, Device  # noqa: E402
from zerobook.utils.versions import versions  # noqa: E402

RUNS = ROOT / "benchmarks" / "published_runs.jsonl"
PAGE = ROOT / "docs" / "measured" / "plan_accuracy.md"
FTUNEAI = ROOT / "benchmarks" / "results" / "published_ftuneai.json"
"""What ``benchmarks/published_ftuneai.py`` wrote."""

STRATEGY_FILES = {
    "fsdp1-full": "fsdp",
    # FSDP that keeps weights gathered is not shipped; ZeRO-2 shards the same.
    "fsdp1-grad-op": "zero2",
    "fsdp1-hybrid": "fsdp_hybrid",
    "fsdp1-full-offload": "fsdp_offload",
    "fsdp2-full": "fsdp",
    "fsdp2-full-offload": "fsdp_offload",
}
"""Name of a strategy in the runs -> shipped strategy file, if it is not the name with ``_`` for ``-``."""
CHECKPOINTING = {"selective-op": "selective", "selective-2nd-layer": "every:2"}
TARGETS = {
    "all-linear": ["all-linear"],
    "q,v": ["q_proj", "v_proj"],
    "q,v,o": ["q_proj", "v_proj", "o_proj"],
    "q,v,o,mlp": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gate,up,down": ["gate_proj", "up_proj", "down_proj"],
    "query_key_value": ["query_key_value"],
}
NETWORKS = {"a100": "1600Gbps"}
"""GPU -> network of a node where a run does not name it; for newer GPUs 3200Gbps."""
ATTENTION_SHARES = {"flash3": 0.68, "flash4": 0.65}
"""Attention kernels that torch does not have -> share of the listed operations a second that they reach."""
TRITON_ATTENTION = 0.6
"""Speed of Triton's attention kernel of 2022 relative to flash attention 2, whose paper (arXiv 2307.08691) compares them."""
GPTQ_BYTES = 22.0
"""Bytes that auto_gptq moves to unpack one weight in torch: shifts of int32, their cast and mask, the gathers of scales and
zeros by group, the difference and the product."""
FUSED_SOFTMAX_BYTES = 25
"""Bytes of each attention score that Megatron's kernel for scale, mask and softmax does not move in a pass."""
LOOP_OPTIMIZERS = {"HF Trainer 4": (110, 17), "composer": (88, 0)}
"""Start of a framework's name -> bytes of each element and kernels of each tensor of an optimizer that is not fused:
transformers' AdamW of 2021 with loss scaling and clipping, and composer's DecoupledAdamW, whose tensors are large."""
RUNS_TO_FIT = 30
"""Runs of a source that constants are fitted to at most."""
WIDE_MISS = 0.25
"""Distance from which a run is listed with its probable cause."""


class UnplannedRunError(Exception):
    """Error for a run that no recipe or strategy file can do; its text says why."""


@dataclass(frozen=True)
class PublishedRun:
    """One measurement."""

    facts: dict[str, Any]

    @property
    def source(self) -> str:
        """Owner and name of the repository that published it."""
        return self.facts["source"].split(":")[0]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second of one GPU; None if no time was published."""
        return self.facts["measured"].get("tokens_per_s_per_gpu")

    @property
    def computes_whole_logits(self) -> bool:
        """Whether the program holds all logits at once. Fused losses, such as Liger's, do not."""
        remarks = " ".join([self.facts["plannable"], self.facts["framework"], *self.facts["caveats"]]).lower()
        return not any(word in remarks for word in ("liger", "chunked", "fused cross"))

    def model_config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        architecture = self.facts["arch"]
        make = MODEL_CONFIGS.get(architecture["family"])
        if make is None:
            raise UnplannedRunError(f"no recipe trains a {architecture['family']}")
        return make(architecture)

    def make_job(self, folder: Path) -> tuple[Job, ConfigSources]:
        """Return the job that plans it, and the sources of its settings. The model's config is written to ``folder``."""
        facts = self.facts
        method = facts["method"]
        file = folder / "model.json"
        file.write_text(json.dumps(self.model_config()))
        checkpointing = facts["activation_checkpointing"]
        flags = {
            "model_name_or_path": str(file),
            "per_device_train_batch_size": facts["micro_batch"],
            "gradient_accumulation_steps": facts["grad_accum"],
            "activation_checkpointing": CHECKPOINTING.get(checkpointing, checkpointing),
            "mixed_precision": "no" if facts["precision"] == "fp32" else facts["precision"],
            "torch_compile": facts["compile"],
        }
        if facts["attention"].startswith(("eager", "megatron")):
            flags["attn_implementation"] = "eager"
        recipe = "causal_lm"
        if method["kind"] != "full":
            flags["dtype"] = "float32" if facts["precision"] == "fp32" else "bfloat16"
            flags["lora_r"] = method["rank"]
            flags["lora_target_modules"] = TARGETS[method["targets"]]
            # T5's classes have short names.
            if facts["target_len"] and method["targets"] == "q,v":
                flags["lora_target_modules"] = ["q", "v"]
            flags["modules_to_save"] = method.get("also_trained", [])
            flags["adapter"] = "dora" if method.get("dora") else "lora"
            if method["kind"] == "qlora":
                flags["load_in_4bit"] = True
            recipe = "lora_finetune"
        if facts["target_len"]:
            recipe = "seq2seq_chatbot"
            flags["max_source_length"] = facts["seq_len"]
            flags["max_target_length"] = facts["target_len"]
        else:
            flags["block_size" if recipe == "causal_lm" else "max_seq_length"] = facts["seq_len"]
        kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
        unknown = set(flags) - set(kind.config_class.model_fields)
        if unknown:
            raise UnplannedRunError(f"recipes/{recipe}.py has no {', '.join(sorted(unknown))}")
        job = make_job(kind(kind.config_class(**flags)))
        sources = {key: f"flag --{key}" if key in flags else "default" for key in kind.config_class.model_fields}
        return replace(job, whole_logits=self.computes_whole_logits, is_plain=True), ConfigSources(sources)

    def cluster(self, fitted: Fit | None = None) -> Cluster:
        """Return the GPUs, and the network between nodes. With ``fitted``, the GPU reaches its shares."""
        facts = self.facts
        gpu = facts["plan_gpu"]
        network = None
        if facts["nodes"] > 1:
            network = facts["interconnect"] or NETWORKS.get(gpu.partition("-")[0], "3200Gbps")
        where = cluster(
            gpus=str(facts["gpus_per_node"]),
            nodes=str(facts["nodes"]),
            gpu=gpu,
            interconnect=network,
            intra_node="pcie" if facts["intra_node"] == "pcie" else None,
        )
        if fitted is not None:
            where = replace(where, device=_with_shares(where.device, fitted))
        share = ATTENTION_SHARES.get(facts["attention"], where.device.attention_share)
        if facts["attention"] == "triton":
            share *= TRITON_ATTENTION
        peer_to_peer = facts.get("peer_to_peer", where.device.peer_to_peer)
        where = replace(where, device=replace(where.device, attention_share=share, peer_to_peer=peer_to_peer))
        if "network_bytes_per_s" in facts:
            where = replace(where, network=facts["network_bytes_per_s"], measured=("network",))
        return where

    def adapt_work(self, work: Work) -> Work:
        """Return the operations of a micro-batch as the run's program computes them, where ours computes them otherwise."""
        facts = self.facts
        if facts["method"].get("quant") == "gptq-int4":
            work = replace(work, dequantised_elements=int(work.dequantised_elements * GPTQ_BYTES / roofline.DEQUANTISED_BYTES))
        if facts["attention"].startswith("megatron"):
            architecture = facts["arch"]
            scores = facts["micro_batch"] * architecture["heads"] * architecture["layers"] * facts["seq_len"] ** 2
            # Forward, backward, and forward again where activations are recomputed.
            passes = 3 if facts["activation_checkpointing"] == "full" else 2
            work = replace(work, moved_bytes=work.moved_bytes - passes * scores * FUSED_SOFTMAX_BYTES)
        return work

    def adapt_time(self, time: StepSeconds, model: ModelWeights, sharding: ShardingSpec, where: Cluster) -> StepSeconds:
        """Return the time with the optimizer of the run's program, if that is not fused."""
        framework = self.facts["framework"]
        for name, (moved_bytes, kernels) in LOOP_OPTIMIZERS.items():
            if not framework.startswith(name) or "DeepSpeed" in framework:
                continue
            elements = model.trained_elements / sharding.optimizer_ranks
            seconds = elements * moved_bytes / (roofline.MEMORY_SHARE * where.device.bandwidth)
            return replace(time, optimizer=seconds + len(model.trained) * kernels * roofline.LAUNCH_SECONDS)
        return time


def _with_shares(device: Device, fitted: Fit) -> Device:
    """Return the device with the fitted shares of its generation: GPUs that have the same shares in `DEVICES`."""
    for gpu in GENERATIONS:
        like = DEVICES[gpu]
        if (like.product_share, like.attention_share) == (device.product_share, device.attention_share):
            product_share, attention_share = fitted.shares[gpu]
            return replace(device, product_share=product_share, attention_share=attention_share)
    return device


def _gpt2(architecture: dict[str, Any]) -> dict[str, Any]:
    # A run whose dropout is not known has that of the model's release.
    dropout = architecture.get("dropout")
    dropout = 0.1 if dropout is None else dropout
    return {
        "model_type": "gpt2",
        "n_embd": architecture["hidden_size"],
        "n_layer": architecture["layers"],
        "n_head": architecture["heads"],
        "n_inner": architecture["intermediate"],
        "vocab_size": architecture["vocab"],
        "n_positions": architecture["positions"],
        "activation_function": architecture["activation"],
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "tie_word_embeddings": architecture["tied"],
    }


def _llama(architecture: dict[str, Any]) -> dict[str, Any]:
    values = {
        "model_type": architecture["family"].removesuffix("ForCausalLM").lower(),
        "hidden_size": architecture["hidden_size"],
        "num_hidden_layers": architecture["layers"],
        "num_attention_heads": architecture["heads"],
        "num_key_value_heads": architecture["kv_heads"],
        "intermediate_size": architecture["intermediate"],
        "vocab_size": architecture["vocab"],
        "tie_word_embeddings": architecture["tied"],
        "max_position_embeddings": 1 << 20,
    }
    if architecture.get("head_dim"):
        values["head_dim"] = architecture["head_dim"]
    return values


def _t5(architecture: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": architecture["family"].removesuffix("ForConditionalGeneration").lower(),
        "d_model": architecture["hidden_size"],
        "d_kv": architecture["d_kv"],
        "d_ff": architecture["intermediate"],
        "num_layers": architecture["layers"],
        "num_decoder_layers": architecture["layers"],
        "num_heads": architecture["heads"],
        "vocab_size": architecture["vocab"],
        "tie_word_embeddings": architecture["tied"],
        "feed_forward_proj": "gated-gelu" if architecture.get("gated") else "relu",
    }


def _bloom(architecture: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "hidden_size": architecture["hidden_size"],
        "n_layer": architecture["layers"],
        "n_head": architecture["heads"],
        "vocab_size": architecture["vocab"],
        "tie_word_embeddings": architecture["tied"],
    }


MODEL_CONFIGS = {
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "T5ForConditionalGeneration": _t5,
    "MT5ForConditionalGeneration": _t5,
    "BloomForCausalLM": _bloom,
}
"""Class of a model -> the function that makes its config.json."""


@dataclass(frozen=True)
class Comparison:
    """A run with its planned step. ``tokens_per_second`` are planned, of one GPU."""

    run: PublishedRun
    time: StepSeconds
    tokens_per_second: float

    @property
    def ratio(self) -> float:
        """Planned over published tokens a second."""
        assert self.run.tokens_per_second is not None
        return self.tokens_per_second / self.run.tokens_per_second

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


@dataclass(frozen=True)
class PlannedRun:
    """The operations and the traffic of a run's step. ``tokens`` are those of one GPU."""

    run: PublishedRun
    work: Work
    visits: int
    transfers: list[Transfer]
    gathers: Gathers
    model: ModelWeights
    sharding: ShardingSpec
    accumulation: int
    compiled: bool
    tokens: int

    def compare(self, fitted: Fit | None = None) -> Comparison:
        """Compare the time that it takes with the published one. ``fitted`` has other constants than the planner's."""
        if fitted is not None:
            with fitted.applied():
                return self._compare(self.run.cluster(fitted))
        return self._compare(self.run.cluster())

    def _compare(self, where: Cluster) -> Comparison:
        time = step_seconds(
            self.run.adapt_work(self.work),
            self.visits,
            self.transfers,
            self.model,
            self.sharding,
            where,
            accumulation=self.accumulation,
            gathers=self.gathers,
            compiled=self.compiled,
        )
        time = self.run.adapt_time(time, self.model, self.sharding, where)
        return Comparison(self.run, time, self.tokens / time.step)


def resolve_run(run: PublishedRun, where: Cluster) -> tuple[Job, LaunchPlan, ShardingSpec, ModelWeights]:
    """Return a run's job, its launch on ``where``, how it shards, and its weights.

    Raises:
        UnplannedRunError: no recipe or strategy file does what it did.
    """
    facts = run.facts
    if facts["plannable"].startswith("no"):
        raise UnplannedRunError(facts["plannable"].removeprefix("no: "))
    strategy = facts["strategy"]
    file = ROOT / "accelerate_configs" / f"{STRATEGY_FILES.get(strategy, strategy.replace('-', '_'))}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        job, sources = run.make_job(Path(folder))
        plan = resolve_launch_plan(file, where, job.config, sources)
        if plan.problems:
            raise UnplannedRunError(plan.problems[0])
        return job, plan, sharding_spec(plan, job.model_config, min(where.gpus, plan.world_size)), job.weights()


class Planner:
    """Plans runs. The operations of equal micro-batches are traced once."""

    def __init__(self) -> None:
        self._works: dict[str, tuple[Work, int]] = {}

    def plan(self, run: PublishedRun) -> PlannedRun:
        """Plan one run.

        Raises:
            UnplannedRunError: no recipe or strategy file does what it did.
        """
        job, plan, sharding, model = resolve_run(run, run.cluster())
        accumulation = job.config.accumulation_steps_on(plan.data_parallel_size)
        work, visits = self._work(job, sharding)
        gathers = follow_gathers(model.weights, sharding, (), accumulation)
        return PlannedRun(
            run=run,
            work=work,
            visits=visits,
            transfers=list_transfers(model, sharding, accumulation, gathers),
            gathers=gathers,
            model=model,
            sharding=sharding,
            accumulation=accumulation,
            compiled=job.config.torch_compile,
            tokens=job.shape.rows * (job.shape.source + job.shape.target) * accumulation,
        )

    def _work(self, job: Job, sharding: ShardingSpec) -> tuple[Work, int]:
        """Return the operations of a micro-batch, and how often its passes enter and leave a module."""
        settings = job.config.model_dump_json(exclude={"model_name_or_path", "gradient_accumulation_steps"})
        config = job.model_config.to_json_string(use_diff=False)
        key = f"{settings} {config} {sharding.cast} {sharding.autocast} {job.whole_logits} {job.is_plain}"
        if key not in self._works:
            trace = trace_job(job, sharding.cast, sharding.autocast, "cuda")
            self._works[key] = (trace.work, len(trace.visits))
        return self._works[key]


def read_runs(file: Path = RUNS) -> list[PublishedRun]:
    """Return the runs that have a time."""
    runs = [PublishedRun(json.loads(line)) for line in file.read_text().splitlines()]
    return [run for run in runs if run.tokens_per_second]


def spread(comparisons: Iterable[Comparison]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the errors, each source weighted alike."""
    by_source = defaultdict(list)
    for comparison in comparisons:
        by_source[comparison.run.source].append(comparison.error)
    weighted = []
    for errors in by_source.values():
        weighted += [(error, 1 / len(errors) / len(by_source)) for error in errors]
    weighted.sort()

    def quantile(share: float) -> float:
        total = 0.0
        for error, weight in weighted:
            total += weight
            if total >= share - 1e-9:
                return error
        return weighted[-1][0]

    return quantile(0.5), quantile(0.9)


@dataclass(frozen=True)
class PeerError:
    """Distance of another program's figure from what was published."""

    run: PublishedRun
    error: float


def peer_table(comparisons: Iterable[Any], figure: str, published_of: Callable[[Any], float]) -> list[str]:
    """Return a table of the plan's errors beside those of ftuneai, on the runs that both plan.

    Args:
        comparisons: have a run and an error.
        figure: its name in what ftuneai planned.
        published_of: returns the published figure of a comparison.
    """
    peer = json.loads(FTUNEAI.read_text())
    ours = [comparison for comparison in comparisons if comparison.run.facts["id"] in peer["runs"]]
    theirs = []
    for comparison in ours:
        planned = peer["runs"][comparison.run.facts["id"]][figure]
        theirs.append(PeerError(comparison.run, abs(planned / published_of(comparison) - 1)))
    rows = [["sources weighted alike", str(len(ours)), _percent(spread(ours)), _percent(spread(theirs))]]
    for source in sorted({comparison.run.source for comparison in ours}):
        our_errors = [comparison.error for comparison in ours if comparison.run.source == source]
        their_errors = [peer_error.error for peer_error in theirs if peer_error.run.source == source]
        cells = [_percent(_quantiles(errors)) for errors in (our_errors, their_errors)]
        rows.append([source, str(len(our_errors)), *cells])
    lines = [
        f"The same runs by [ftuneai](https://pypi.org/project/ftuneai/) {peer['ftuneai']}, which uses formulas and",
        f"traces no model, on {peer['date']}: `benchmarks/published_ftuneai.py`. Runs that it cannot describe are left out in",
        "both columns.",
        "",
    ]
    return lines + _table(["", "runs", "zerobook plan", "ftuneai"], rows)


def _percent(errors: tuple[float, float]) -> str:
    median, late = errors
    return f"{median:.0%} / {late:.0%}"


def _table(header: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " --- |" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return [*lines, ""]


def _billions(run: PublishedRun) -> str:
    parameters = run.facts["params_b"]
    for low, high in ((0, 1), (1, 4), (4, 10), (10, 40)):
        if parameters < high:
            return f"{low}B to {high}B"
    return "40B and more"


GROUPS = {
    "source": lambda run: run.source,
    "GPU": lambda run: run.facts["plan_gpu"],
    "strategy": lambda run: run.facts["strategy"],
    "method": lambda run: run.facts["method"]["kind"],
    "parameters": _billions,
}
"""Heading -> what runs are grouped by."""


def _cause(comparison: Comparison) -> str:
    """Return the probable cause of a large distance; "not known" if there is none."""
    facts = comparison.run.facts
    if "network_bytes_per_s" in facts:
        return "the network: its load changed the publisher's times by 40%"
    if facts["plannable"] != "yes":
        return facts["plannable"].removeprefix("approx: ")
    return "not known"


INTRODUCTION = """
Each row of `benchmarks/published_runs.jsonl` is a training run that another project published. It is planned with its own
model, GPUs, strategy, micro-batch, precision and attention, and with all logits at once if its program keeps them. None of
these runs was repeated here. Memory follows below.

- *error*: |planned / published - 1| of the tokens per second of one GPU, as median / 90th percentile
- *ratio*: the median of planned / published. Above 1, the plan is too fast.
- *left out*: the constants of the model of time are fitted to these runs. In this column, they are fitted only to the runs of
  the other sources. The fit starts from estimates that come from none of these runs (`benchmarks/fit_times.py`). Expect
  this error for a program and a cluster that are not in the table.

If a program computes in another way than Zerobook, its runs are planned in that way, and the key `caveats` of their rows says
so: Triton's attention kernel, GPTQ, Megatron's softmax, an optimizer that is not fused, a network whose rate its own benchmark
measured.
"""


def _ratios(planned: list[PlannedRun], fitted: Fit) -> list[float]:
    return [each.compare(fitted).ratio for each in planned]


def leave_sources_out(planned: list[PlannedRun]) -> list[Comparison]:
    """Return each run as planned with the constants that are fitted to the runs of all other sources."""
    comparisons = []
    for source in sorted({each.run.source for each in planned}):
        others = []
        for other in sorted({each.run.source for each in planned} - {source}):
            runs = [each for each in planned if each.run.source == other]
            # More runs of one program change the constants little, and each costs time.
            others += runs[:: math.ceil(len(runs) / RUNS_TO_FIT)]

        fitted = fit([each.run.source for each in others], partial(_ratios, others))
        print(f"fitted without {source}", flush=True)
        comparisons += [each.compare(fitted) for each in planned if each.run.source == source]
    return comparisons


def page(comparisons: list[Comparison], left_out: list[Comparison], unplanned: list[tuple[PublishedRun, str]]) -> str:
    """Return the page as Markdown. ``left_out`` are the runs as `leave_sources_out` returns them."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "zerobook")
    lines = [
        "# Planned times against published runs",
        "",
        *INTRODUCTION.strip().splitlines(),
        "",
        f"Written by `python benchmarks/published_runs.py` on {date.today()}. {found}.",
        "",
    ]
    errors = [comparison.error for comparison in comparisons]
    rows = [
        ["sources weighted alike", str(len(comparisons)), _percent(spread(comparisons)), ""],
        ["sources weighted alike, each left out in turn", str(len(left_out)), _percent(spread(left_out)), ""],
        ["runs weighted alike", str(len(comparisons)), _percent(_quantiles(errors)), _ratio(comparisons)],
    ]
    lines += _table(["", "runs", "error", "ratio"], rows)
    for heading, group_of in GROUPS.items():
        lines += _group_table(heading, group_of, comparisons, left_out)

    lines += ["## Beside another program", ""]
    lines += peer_table(comparisons, "tokens_per_s_per_gpu", lambda comparison: comparison.run.tokens_per_second)

    misses = [comparison for comparison in comparisons if comparison.error > WIDE_MISS]
    lines += [
        f"## Runs more than {WIDE_MISS:.0%} off",
        "",
        "*training*: model, method, tokens of a row x rows of a micro-batch. *GPUs*: nodes x GPUs of a node, and the strategy.",
        "*published* and *planned*: tokens per second of one GPU. *waits for*: the part of the planned step that is longest,",
        "as in [the table of `zerobook plan`](../guides/plan.md); `launches` is the host's time to start the kernels.",
        "",
    ]
    rows = []
    for miss in sorted(misses, key=lambda miss: -miss.error):
        facts = miss.run.facts
        what = f"{facts['model']}, {facts['method']['kind']}, {facts['seq_len']} x {facts['micro_batch']}"
        where = f"{facts['nodes']} x {facts['gpus_per_node']} {facts['plan_gpu']}, {facts['strategy']}"
        rates = f"{miss.run.tokens_per_second:,.0f}", f"{miss.tokens_per_second:,.0f}", f"{miss.ratio:.2f}"
        rows.append([facts["id"], what, where, *rates, miss.time.bound, _cause(miss)])
    lines += _table(["run", "training", "GPUs", "published", "planned", "ratio", "waits for", "probable cause"], rows)
    lines += ["## Runs that were not planned", ""]
    lines += _table(["run", "reason"], [[run.facts["id"], reason] for run, reason in unplanned])
    return "\n".join(lines)


def _group_table(
    heading: str, group_of: Callable[[PublishedRun], str], comparisons: list[Comparison], left_out: list[Comparison]
) -> list[str]:
    groups = defaultdict(list)
    for comparison in comparisons:
        groups[group_of(comparison.run)].append(comparison)
    errors_left_out = defaultdict(list)
    for comparison in left_out:
        errors_left_out[group_of(comparison.run)].append(comparison.error)
    rows = []
    for name, members in sorted(groups.items()):
        errors = _percent(_quantiles([member.error for member in members]))
        rows.append([name, str(len(members)), errors, _percent(_quantiles(errors_left_out[name])), _ratio(members)])
    return _table([heading, "runs", "error", "error, left out", "ratio"], rows)


def _quantiles(errors: list[float]) -> tuple[float, float]:
    ordered = sorted(errors)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def _ratio(comparisons: list[Comparison]) -> str:
    return f"{statistics.median(comparison.ratio for comparison in comparisons):.2f}"


def main() -> None:
    """Plan the runs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose source contains this; no page is written")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    flags = parser.parse_args()
    planner = Planner()
    planned = []
    unplanned = []
    for run in read_runs():
        if flags.only not in run.source:
            continue
        try:
            planned.append(planner.plan(run))
        except (UnplannedRunError, ConfigError) as error:
            unplanned.append((run, str(error)))
            continue
        print(f"{run.facts['id']:<24} {planned[-1].compare().ratio:.2f}", flush=True)
    if not planned:
        sys.exit(f"--only {flags.only}: no run that can be planned has this in its source.")
    comparisons = [each.compare() for each in planned]
    print(f"sources weighted alike: {_percent(spread(comparisons))}")
    # Constants are fitted to the runs of all other sources.
    if flags.only:
        return
    left_out = leave_sources_out(planned)
    # The section about memory, which benchmarks/published_memory.py writes, stays.
    memory = flags.page.read_text().partition("\n## Memory\n") if flags.page.exists() else ("", "", "")
    flags.page.write_text(page(comparisons, left_out, unplanned) + "".join(memory[1:]))
    print(f"each source left out in turn: {_percent(spread(left_out))}; wrote {flags.page}")


if __name__ == "__main__":
    main()

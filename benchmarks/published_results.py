"""Put well-known published results beside what is planned for them, and write docs/measured/published.md.

usage: published_results.py [--only WORD] [--page FILE]

The measurements of benchmarks/published_runs.jsonl have a page of their own, see published_runs.py. Here are results that are
no list of measurements: two tables of a blog post, figures of an estimator, a training's hours, and claims of papers. Nothing
is downloaded and nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zerobook.config_sources import ConfigSources  # noqa: E402
from zerobook.plan import formulas  # noqa: E402
from zerobook.plan.failures import plan_failures  # noqa: E402
from zerobook.plan.hardware import Cluster, cluster  # noqa: E402
from zerobook.plan.job import make_job  # noqa: E402
from zerobook.plan.rows import Row, plan_row, resolve_launch_plan  # noqa: E402
from zerobook.plan.sharding import sharding_spec  # noqa: E402
from zerobook.plan.state_bytes import count_states  # noqa: E402
from zerobook.plan.traced_job import TracedJob  # noqa: E402
from zerobook.training.recipe_file import recipe_class  # noqa: E402
from zerobook.utils.versions import versions  # noqa: E402

MODELS = ROOT / "benchmarks" / "models"
PAGE = ROOT / "docs" / "measured" / "published.md"
WIDE_MISS = 0.25
"""Distance from which a result needs a reason, or the words "not known"."""
ACCELERATE_BLOG = "https://huggingface.co/blog/accelerate-deepspeed (June 2022)"
GIB = 2**30


@dataclass(frozen=True)
class Result:
    """A published figure beside the planned one, in the same unit; both are texts if they are not numbers.

    ``reason`` is why they may differ by more than `WIDE_MISS`, and is shown where they do; empty if it is not known.
    """

    what: str
    unit: str
    published: float | str
    planned: float | str
    source: str
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        if isinstance(self.published, str) or isinstance(self.planned, str):
            return None
        return self.planned / self.published

    @property
    def misses(self) -> bool:
        """Whether the planned figure is far from the published one, or another word."""
        if self.ratio is None:
            # A tight plan says that the run may or may not fit.
            return self.planned not in (self.published, "tight")
        return abs(self.ratio - 1) > WIDE_MISS

    def cells(self) -> list[str]:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        reason = ""
        if self.misses:
            reason = self.reason or "not known"
        return [self.what, _text(self.published), _text(self.planned), self.unit, ratio, reason, self.source]


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _make(recipe: str, model: str | Path, **flags: Any) -> TracedJob:
    kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    return TracedJob.of(make_job(kind(kind.config_class(model_name_or_path=str(model), **flags))), "cuda")


def _plan(strategy: str, recipe: str, model: str | Path, where: Cluster, **flags: Any) -> Row:
    """Return the plan of one strategy file."""
    traced = _make(recipe, model, **flags)
    sources = ConfigSources(dict.fromkeys(type(traced.job.config).model_fields, "default"))
    row = plan_row(ROOT / "accelerate_configs" / f"{strategy}.yaml", traced, where, sources)
    if row.problems:
        raise RuntimeError(f"{strategy} of {model}: {row.problems[0]}")
    return row


def _fits(row: Row) -> str:
    if not row.fits:
        return "out of memory"
    return "tight" if row.tight else "fits"


def dialogues() -> Iterator[Result]:
    """Table A: a dialogue model on two devices, DDP against ZeRO-2."""
    where = cluster(gpus="2", gpu="titan-rtx")
    lengths = {"max_source_length": 128, "max_target_length": 64, "mixed_precision": "fp16"}
    source = f"table 2 of {ACCELERATE_BLOG}"
    published = {"ddp": (100, 27.36), "zero2": (200, 19.06)}
    for strategy, (batch, seconds) in published.items():
        for tried in (100, 200):
            row = _plan(
                strategy,
                "seq2seq_chatbot",
                MODELS / "blenderbot_400m.json",
                where,
                per_device_train_batch_size=tried,
                **lengths,
            )
            expected = "fits" if tried <= batch else "out of memory"
            yield Result(f"A. BlenderBot-400M, 2 x Titan RTX, {strategy}, batch {tried}", "", expected, _fits(row), source)
            if tried == batch and row.time is not None:
                steps = 10_000 / (2 * batch)
                yield Result(
                    f"A. an epoch of 10,000 pairs, {strategy}, batch {batch}", "s", seconds, steps * row.time.step, source,
                    "the timer of the published script does not wait for the devices; lengths are those of its script, padded",
                )  # fmt: skip


def one_device() -> Iterator[Result]:
    """Table B: a model that one device does not hold."""
    where = cluster(gpus="1", gpu="titan-rtx")
    source = f"table 3 of {ACCELERATE_BLOG}"
    flags = {"mixed_precision": "fp16", "block_size": 128}
    alone = _plan("ddp", "causal_lm", MODELS / "gpt2_xl.json", where, per_device_train_batch_size=1, **flags)
    yield Result("B. GPT-2 XL, Titan RTX, DDP, batch 1", "", "out of memory", _fits(alone), source)
    offloaded = _plan(
        "zero3_offload_optimizer", "causal_lm", MODELS / "gpt2_xl.json", where, per_device_train_batch_size=16, **flags
    )
    yield Result("B. GPT-2 XL, ZeRO-3 with the optimizer on the host, batch 16", "", "fits", _fits(offloaded), source)
    yield Result(
        "B. GPT-2 XL, the same run: speed", "tokens/s", 362, offloaded.tokens_per_second, source,
        "not known; in part the rate of the host's memory, which limits Adam on the host and is not published",
    )  # fmt: skip


T5_3B = {
    "model_type": "t5", "is_encoder_decoder": True, "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32,
    "num_layers": 24, "num_decoder_layers": 24, "vocab_size": 32128, "decoder_start_token_id": 0,
    "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip


def estimator() -> Iterator[Result]:
    """DeepSpeed's estimator of states for T5-3B on 8 GPUs, as its documentation prints it."""
    where = cluster(gpus="8", gpu="a100-80gb")
    source = "DeepSpeed's documentation, Memory Requirements: 2,851 million parameters, in GiB"
    printed = {"zero2": 15.93, "zero2_offload": 5.31, "zero3": 6.10, "zero3_offload_optimizer": 0.79}
    reasons = {
        "zero2": "the documentation counts 4 P + 16 P/N bytes for P parameters on N GPUs; now each rank keeps 2-byte gradients "
        "of its part only",
        "zero3": "it adds the largest layer, gathered, which is not among the states",
        "zero3_offload_optimizer": "it adds the largest layer, gathered, which is not among the states",
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "t5_3b.json"
        file.write_text(json.dumps(T5_3B))
        traced = _make("seq2seq_chatbot", file, mixed_precision="bf16")
    sources = ConfigSources(dict.fromkeys(type(traced.job.config).model_fields, "default"))
    for strategy, gib in printed.items():
        plan = resolve_launch_plan(ROOT / "accelerate_configs" / f"{strategy}.yaml", where, traced.job.config, sources)
        states = count_states(traced.model, sharding_spec(plan, traced.job.model_config, 8)).device.total
        what = f"T5-3B, 8 GPUs, {strategy}: states on a GPU"
        yield Result(what, "GiB", gib, states / GIB, source, reasons.get(strategy, ""))


def falcon() -> Iterator[Result]:
    """Falcon-180B with LoRA: the shipped recipe follows the published run."""
    header = (ROOT / "recipes" / "configs" / "falcon" / "180b_lora_8xa100.yaml").read_text().splitlines()
    (plan,) = [line for line in header if line.startswith("# Plan:")]
    minutes = float(plan.split(" minutes")[0].split()[-1])
    yield Result(
        "Falcon-180B, LoRA, 8 x A100 80 GB, ZeRO-3, 3 epochs of dolly-15k", "min", 153, minutes,
        "https://www.philschmid.de/deepspeed-lora-flash-attention; the number of steps is not published",
    )  # fmt: skip


def llama() -> Iterator[Result]:
    """Llama-2-70B with FSDP, all weights."""
    where = cluster(gpus="8", nodes="2", gpu="a100-80gb", interconnect="400Gbps", host_memory="1TB")
    flags = {"mixed_precision": "bf16", "activation_checkpointing": True, "block_size": 2048}
    row = _plan("fsdp", "causal_lm", MODELS / "llama2_70b.json", where, per_device_train_batch_size=1, **flags)
    source = "https://huggingface.co/blog/ram-efficient-pytorch-fsdp (September 2023)"
    what = "Llama-2-70B, 2 nodes of 8 x A100 80 GB, FSDP, 2048 tokens, batch 1"
    assert row.memory is not None and row.time is not None
    needed = f"{row.memory.total / 1e9:.1f} GB are planned, and a card of 80 GB has 85.0 x 10^9 bytes"
    yield Result(what, "", "fits", _fits(row), source, needed)
    yield Result(
        "Llama-2-70B, the same run: 500 steps", "hours", 13.5, 500 * row.time.step / 3600, source,
        "not known; a network of about 68 Gbit/s a node would explain it; the plan assumes 400",
    )  # fmt: skip


def zero_offload() -> Iterator[Result]:
    """ZeRO-Offload on one V100, arXiv:2101.06840."""
    where = cluster(gpus="1", gpu="v100-32gb", host_memory="1.5TB")
    source = "ZeRO-Offload, arXiv:2101.06840, abstract; a micro-batch of 8 is assumed"
    shape = {"model_type": "gpt2", "n_embd": 4096, "n_layer": 50, "n_head": 32}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt2_10b.json"
        file.write_text(json.dumps(shape))
        row = _plan(
            "zero2_offload", "causal_lm", file, where, mixed_precision="fp16", activation_checkpointing=True,
            per_device_train_batch_size=8, gradient_accumulation_steps=64,
        )  # fmt: skip
    parameters = 12 * 50 * 4096**2
    # A forward pass, a backward pass and the recomputation: 8 operations for each parameter and token.
    teraflops = 8 * parameters * row.tokens_per_second / 1e12
    yield Result(
        "GPT-2 of 10 billion parameters, V100 32 GB, optimizer on the host, global batch 512", "", "fits", _fits(row), source
    )
    yield Result(
        "GPT-2 of 10 billion parameters, the same run: rate, with recomputation counted",
        "10^12 operations/s",
        40,
        teraflops,
        source,
    )


def llama3() -> Iterator[Result]:
    """54 days of Llama 3 405B on 16,384 H100."""
    source = "The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4"
    planned = plan_failures("llama3", 16_384, 2048, formulas.CHECKPOINT_BYTES * 405e9)
    yield Result(
        "Llama 3 405B, 54 days on 16,384 H100: effective training time", "%", 90, 100 * planned.goodput,
        f"{source}: more than 90 %; from its 419 failures, with saves of {planned.save:.1f} s and restarts of 5 min assumed",
    )  # fmt: skip


def papers() -> Iterator[Result]:
    """ZeRO's own figures."""
    source = "ZeRO, arXiv:1910.02054, figure 1 and table 1"
    for stage, printed in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.9)):
        total = formulas.model_states(7.5e9, stage, 64, mixed=True).total
        yield Result(
            f"states of 7.5 billion parameters on 64 GPUs, stage {stage}, by formula", "GB", printed, total / 1e9, source
        )


GROUPS: tuple[Callable[[], Iterator[Result]], ...] = (
    papers,
    estimator,
    llama3,
    falcon,
    dialogues,
    one_device,
    zero_offload,
    llama,
)
TEXT = """\
# Published beside planned

Written by `python benchmarks/published_results.py` on {date}: {versions}.

Each row has a result that others published, and what Zerobook plans for the same model, machine and strategy. None of these
runs was repeated here. A ratio is planned / published. If the two are more than 25 % apart, or only one of them fits, the row
has the reason, or *not known*. This is so in {misses} of {count} rows. A plan that is *tight* may fit or not, so it agrees
with both. Training speeds of many more runs are [on another page](plan_accuracy.md). The rows that begin with A and B are
from two tables of a blog post. These tables are [run again at a small scale](tables.md).

| result | published | planned | unit | ratio | why they differ | source |
| --- | ---: | ---: | --- | ---: | --- | --- |
"""


def page(results: list[Result]) -> str:
    """Return the page."""
    misses = sum(result.misses for result in results)
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "zerobook")
    text = TEXT.format(date=date.today(), versions=libraries, misses=misses, count=len(results))
    lines = [f"| {' | '.join(result.cells())} |" for result in results]
    return text + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Put published results beside planned ones.")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only groups with this in their name; no page without --page"
    )
    parser.add_argument("--page", type=Path, help=f"write the page there (default {PAGE.relative_to(ROOT)})")
    arguments = parser.parse_args()
    results = []
    for group in GROUPS:
        if arguments.only not in group.__name__:
            continue
        for result in group():
            print(" | ".join(result.cells()), flush=True)
            results.append(result)
    target = arguments.page or (None if arguments.only else PAGE)
    if target is not None:
        target.write_text(page(results))
        print(f"wrote {target}")


if __name__ == "__main__":
    main()

"""Table B: a model that is too large for one device, DDP against ZeRO-3 with the optimizer offloaded.

Both scales run the same job with the published DeepSpeed file, which keeps the optimizer in host RAM and the weights on the
device. A CPU process has no device memory. At the tiny scale, the budget is for the tensors that a GPU would hold: what an
arm offloads is counted in a run without a budget, and the process gets these bytes in addition.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.bench import Bench
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import Arm, Outcome, Search, fingerprint, largest
from zerobook.utils.units import size

SOURCE = (
    "https://huggingface.co/blog/accelerate-deepspeed (June 2022), table 3: GPT-2 XL (1.5B) from a random initialisation, one "
    "24 GB Titan RTX, wikitext-2 in blocks of 128. 362 tokens/s follow from 1,168 steps of 16 x 128 tokens in 6608.35 s."
)
BUDGET = 400_000_000
"""Bytes of the device at the tiny scale: the model's states are 16 bytes a parameter, 430 10^6."""
BUCKET = 1_000_000
"""Elements of ZeRO-3's buckets at the tiny scale; DeepSpeed's default of 500M is larger than the whole model."""
EPOCH = 1168
OFFLOADED = ("gradients", "optimizer")
"""Tensors that the published file keeps in host RAM: gradients for the CPU's optimizer, fp32 masters and moments."""


def run(bench: Bench) -> Table:
    """Find the largest batch of each arm, and measure tokens a second with it (with 16 at the published size, where it
    fits)."""
    budget = bench.budget or (BUDGET if bench.tiny else 24 * 2**30)
    block, steps = (64, 4) if bench.tiny else (128, 12)
    flags = {
        "model_name_or_path": bench.gpt2, "train_file": bench.materials.text, "cache_dir": bench.folder / "data",
        "block_size": block, "validation_split_percentage": 0, "learning_rate": 5e-4, **bench.precision,
    }  # fmt: skip
    table = Table("B", "A model that one device does not hold", SOURCE, _settings(bench, budget, block, steps))
    fits: dict[str, Search] = {}
    arms = _arms(bench)
    with table.keeping_what_ran():
        for arm in arms:
            plain = arm is arms[0]
            line = Line(arm.name, _published(plain), config=fingerprint(arm, "causal_lm", flags))
            table.lines.append(line)
            host = 0 if plain or not bench.where.cpu else _offloaded(bench, arm, flags)

            def tries(batch: int, arm: Arm = arm, host: int = host, steps: int = 2) -> Outcome:
                bench.say(f"B: {arm.name}, a batch of {batch}")
                sizes = {"per_device_train_batch_size": batch, "max_train_steps": steps}
                return bench.attempt(arm, "causal_lm", flags | sizes, budget + host)

            found = fits[arm.name] = largest(tries, start=1 if plain else 16, most=16 if bench.quick else 64)
            line.here["largest batch"] = found.largest or "out of memory at 1"
            if host:
                line.here["offloaded, MB"] = host / 1e6
            if found.largest:
                batch = min(16, found.largest)
                outcome = tries(batch, steps=steps)
                line.here |= {"batch": batch, "tokens/s": batch * block / outcome.step if outcome.fits else "out of memory"}
                if not bench.tiny and batch == 16 and outcome.fits:
                    line.here["epoch, s, from its median step"] = EPOCH * outcome.step
        table.findings = _findings(fits, arms[0].name)
    table.notes = [f"{name}, a batch of {found.refused}: `{found.why}`" for name, found in fits.items() if found.refused]
    return table


def _published(plain: bool) -> dict[str, object]:
    return {"batch": "out of memory at 1"} if plain else {"batch": 16, "tokens/s": 362, "epoch, s": 6608.35}


def _arms(bench: Bench) -> list[Arm]:
    file, name = "published/zero3_offload", "ZeRO-3, optimizer offloaded"
    if not bench.tiny:
        return [bench.replicated(1), Arm.of(file, 1, name)]
    arm = bench.variant(file, 1, name, reduce_bucket_size=BUCKET, stage3_prefetch_bucket_size=BUCKET)
    if bench.where.cpu:  # which does not train in fp16
        arm = replace(arm, launcher=(*arm.launcher, "--mixed_precision", "no"))
    return [bench.replicated(1), arm]


def _offloaded(bench: Bench, arm: Arm, flags: dict[str, object]) -> int:
    """Return the bytes that ``arm`` keeps in host RAM, counted from live tensors in a run without a budget."""
    bench.say(f"B: {arm.name}, what it offloads")
    outcome = bench.attempt(arm, "causal_lm", flags | {"per_device_train_batch_size": 1, "max_train_steps": 2}, 0)
    return sum(outcome.held[kind] for kind in OFFLOADED)


def _settings(bench: Bench, budget: int, block: int, steps: int) -> str:
    model = (
        "GPT-2 of 26M parameters, fp32; for ZeRO-3, buckets of 1M elements and otherwise"
        if bench.tiny
        else "GPT-2 XL, random weights, fp16; for ZeRO-3,"
    )
    counted = (
        " A CPU process has no device memory. So the bytes that are offloaded (fp32 masters, moments, and gradients) are "
        "measured in a separate run, and are added to the limit."
        if bench.where.cpu
        else ""
    )
    return (
        f"{model} the published DeepSpeed file; one device of {size(budget)} for what is not offloaded; blocks of {block} "
        f"tokens; tokens a second from the median of the {steps - 1} steps after the first.{counted}"
    )


def _findings(fits: dict[str, Search], plain: str) -> list[Finding]:
    most, called = fits[plain].largest, plain[0].upper() + plain[1:]
    claims = [Finding(f"{called} is out of memory at batch 1", most == 0, f"batch {most} fits" if most else "")]
    for name, found in fits.items():
        if name != plain:
            cause = f"batch {found.largest} (published: 16)" if found.largest else ""
            claims.append(Finding(f"{name}, fits where {plain} does not", found.largest > 0 and most == 0, cause))
    return claims

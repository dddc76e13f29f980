"""Table A: DDP against ZeRO-2 on two devices, a dialogue model finetuned and evaluated by beam search."""

from __future__ import annotations

import itertools

from benchmarks.published.bench import ROOT, Bench
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import Arm, Outcome, Search, fingerprint, largest
from zerobook.utils.units import size

SOURCE = (
    "https://huggingface.co/blog/accelerate-deepspeed (June 2022), table 2: BlenderBot-400M, two 24 GB Titan RTX, fp16, 10,000 "
    "training and 1,000 validation pairs."
)
NOTES = [
    "The published runs differ in more than the strategy. ZeRO-2 has twice the batch, so it takes 25 optimizer steps and "
    "DDP 50. ZeRO-2 uses AdamW and DDP Adam. The warm-up of 100 steps is longer than both runs, so their learning rates are "
    "different and never reach the maximum. The published timer does not wait for the devices. Here, both use AdamW with "
    "the same schedule, and the time of a step includes waiting for the device. In the third row ZeRO-2 has the batch of "
    "DDP, so that only the strategy is different.",
]
BUDGET = 680_000_000
"""Bytes of a process at the tiny scale. DDP's states take 522 10^6 of them during the forward pass, ZeRO-2's 326 10^6."""
BUCKET = 1_000_000
"""Elements of ZeRO-2's buckets at the tiny scale; the published 200M are larger than the whole model."""
RULES = {"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "length_penalty": 0.0}
"""Rules of the published evaluation's search, constants of its script:
https://github.com/pacman100/accelerate-deepspeed-test, src/modeling/run_seq2seq_no_trainer.py"""
PUBLISHED: dict[str, dict[str, float]] = {
    "DDP": {"batch": 100, "eval batch": 50, "training, s": 27.36, "evaluation, s": 48.41},
    "ZeRO-2": {"batch": 200, "eval batch": 100, "training, s": 19.06, "evaluation, s": 39.27},
}


def run(bench: Bench) -> Table:
    """Find the largest batches of both arms, then run their epochs, as printed and at an equal batch."""
    budget = bench.budget or (BUDGET if bench.tiny else 24 * 2**30)
    ranks = min(2, bench.ranks)
    ddp, zero2 = Arm.of("ddp", ranks, "DDP"), _zero2(bench, ranks)
    train, held_out = (240, 48) if bench.tiny else (10_000, 1_000)
    settings = _settings(bench, ranks, budget, _lengths(bench), train, held_out)
    table = Table("A", "DDP against ZeRO-2: dialogue finetune on two devices", SOURCE, settings)
    fits: dict[str, tuple[Search, Search]] = {}
    found: dict[str, Outcome] = {}
    with table.keeping_what_ran():
        for arm, named, by in ((ddp, "DDP", "DDP"), (zero2, "ZeRO-2", "ZeRO-2"), (zero2, "ZeRO-2, with DDP's batch", "DDP")):
            flags = (
                _flags(bench)
                | _evaluation(bench)
                | {"validation_file": bench.materials.pairs, "n_train": train, "n_val": held_out}
            )
            as_printed = named == by
            line = Line(named, PUBLISHED[by] if as_printed else {})
            table.lines.append(line)
            if as_printed:
                fits[by] = _search(bench, arm, budget)
                line.here |= {"largest batch": fits[by][0].largest, "largest eval batch": fits[by][1].largest}
            batch, eval_batch = _batches(bench, by, fits[by])
            if batch and eval_batch:
                flags |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": eval_batch}
                line.config = fingerprint(arm, "seq2seq_chatbot", flags)
                bench.say(f"A: {named}, an epoch with {batch} and {eval_batch}")
                outcome = found[named] = bench.attempt(arm, "seq2seq_chatbot", flags, _for_an_epoch(bench, budget))
                line.here |= _epoch(outcome, batch, eval_batch)
        table.findings = _findings(fits, found)
    table.notes = [*NOTES, *_refusals(fits)]
    return table


def _search(bench: Bench, arm: Arm, budget: int) -> tuple[Search, Search]:
    """Return the largest training batch, and the largest evaluation batch after two steps of one sample."""
    ranks, flags, start = arm.ranks, _flags(bench), PUBLISHED[arm.name]

    def trains(batch: int) -> Outcome:
        bench.say(f"A: {arm.name}, a training batch of {batch}")
        short = {"n_train": 2 * batch * ranks, "validation_split_percentage": 0, "per_device_train_batch_size": batch}
        return bench.attempt(arm, "seq2seq_chatbot", flags | short, budget)

    def evaluates(batch: int) -> Outcome:
        bench.say(f"A: {arm.name}, an evaluation batch of {batch}")
        short = _evaluation(bench) | {"validation_file": bench.materials.pairs, "n_train": 2 * ranks, "n_val": batch * ranks}
        short |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": batch}
        return bench.attempt(arm, "seq2seq_chatbot", flags | short, budget)

    most = 256 if bench.tiny else 1024
    return (
        largest(trains, start=16 if bench.tiny else int(start["batch"]), most=most),
        largest(evaluates, start=16 if bench.tiny else int(start["eval batch"]), most=most),
    )


def _epoch(outcome: Outcome, batch: int, eval_batch: int) -> dict[str, object]:
    sizes: dict[str, object] = {"batch": batch, "eval batch": eval_batch}
    if not outcome.fits:
        return sizes | {"training, s": "out of memory"}
    return sizes | {
        "steps": len(outcome.steps), "training, s": outcome.training, "evaluation, s": outcome.evaluation,
        "held-out loss": outcome.result.get("loss"),
    }  # fmt: skip


def shape(bench: Bench) -> Table:
    """Run both arms on one device, a few steps with each of the published batches. There, ZeRO-2 has no other rank to share
    with."""
    budget = bench.budget or (BUDGET if bench.tiny else 24 * 2**30)
    batches = (8, 16) if bench.tiny else (100, 200)
    plain, zero2 = bench.replicated(1), _zero2(bench, 1)
    title = f"{plain.name} against ZeRO-2, on one device"
    table = Table("A", title[0].upper() + title[1:], SOURCE, _settings(bench, 1, budget, _lengths(bench), 0, 0))
    published = {plain.name: PUBLISHED["DDP"]["batch"], zero2.name: PUBLISHED["ZeRO-2"]["batch"]}
    with table.keeping_what_ran():
        for arm, batch in itertools.product((plain, zero2), batches):
            bench.say(f"A: {arm.name}, a training batch of {batch}")
            flags = _flags(bench) | {"n_train": 6 * batch, "validation_split_percentage": 0}
            flags |= {"per_device_train_batch_size": batch}
            outcome = bench.attempt(arm, "seq2seq_chatbot", flags, budget)
            here: dict[str, object] = {"batch": batch, "fits": outcome.fits}
            if outcome.fits:
                here |= {"s a step": outcome.step, "samples/s": batch / outcome.step}
            printed = {"batch": published[arm.name]} if batch == published[arm.name] else {}
            table.lines.append(Line(f"{arm.name}, {batch}", printed, here, fingerprint(arm, "seq2seq_chatbot", flags)))
    return table


def _lengths(bench: Bench) -> tuple[int, int, int]:
    """Return the tokens of a source, the tokens of a target, and the minimum of generated tokens."""
    return (32, 16, 8) if bench.tiny else (128, 64, 20)


def _flags(bench: Bench) -> dict[str, object]:
    """Return the flags that all runs of this table have in common."""
    source, target, least = _lengths(bench)
    return {
        "model_name_or_path": bench.blenderbot, "train_file": bench.materials.pairs, "num_train_epochs": 1,
        "cache_dir": bench.folder / "data", "source_prefix": "chatbot: ", "pad_to_max_length": "true", "num_beams": 10,
        "max_source_length": source, "max_target_length": target, "val_max_target_length": target,
        "val_min_target_length": least, "learning_rate": 1e-6, "weight_decay": 0.0, "num_warmup_steps": 100, "seed": 25,
        **bench.precision,
    }  # fmt: skip


def _evaluation(bench: Bench) -> dict[str, object]:
    """Return the flags of an evaluation. At the published size it generates for all pairs, under the published rules."""
    return {"n_val_batch_generations": 5} if bench.tiny else {**RULES}


def _zero2(bench: Bench, ranks: int) -> Arm:
    if bench.tiny:
        return bench.variant("zero2", ranks, "ZeRO-2", reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET)
    published = ROOT / "ds_configs" / "published" / "zero2_config_accelerate.json"
    return Arm("ZeRO-2", ("--use_deepspeed", "--deepspeed_config_file", str(published)), ranks)


def _for_an_epoch(bench: Bench, budget: int) -> int:
    """Return the bytes of a process for an epoch. At the tiny scale, the batches were found in separate runs of two steps;
    an epoch has training and evaluation in one process, and needs more."""
    return budget + budget // 10 if bench.tiny else budget


def _batches(bench: Bench, arm: str, fits: tuple[Search, Search]) -> tuple[int, int]:
    """Return the training and the evaluation batch of an epoch: the published ones, or the largest found at the tiny scale."""
    if bench.tiny:
        return fits[0].largest, fits[1].largest
    return int(PUBLISHED[arm]["batch"]), int(PUBLISHED[arm]["eval batch"])


def _settings(bench: Bench, ranks: int, budget: int, lengths: tuple[int, ...], train: int, held_out: int) -> str:
    small = (
        f"BlenderBot of 33M parameters, fp32, with buckets of {BUCKET // 10**6}M elements for ZeRO-2"
        if bench.tiny
        else "BlenderBot-400M, random weights, fp16"
    )
    if not train:
        return f"{small}; one process of {size(budget)}, {lengths[0]} + {lengths[1]} tokens, padded; the median of 5 steps."
    return (
        f"{small}; {ranks} processes of {size(budget)} each for the model, its states and activations; {train:,} training and "
        f"{held_out:,} validation pairs, {lengths[0]} + {lengths[1]} tokens, padded; evaluation of "
        f"{'5 batches' if bench.tiny else 'all pairs'} with 10 beams. "
        "The largest batch is found by bisection in new processes, with an error of at most an eighth or 2 samples."
        + (
            " In the runs of a whole epoch, the limit is 10 % higher, since a process both trains and evaluates."
            if bench.tiny
            else ""
        )
    )


def _findings(fits: dict[str, tuple[Search, Search]], found: dict[str, Outcome]) -> list[Finding]:
    ddp, zero2 = fits["DDP"], fits["ZeRO-2"]
    claims = [
        Finding("ZeRO-2 fits a larger training batch than DDP", zero2[0].largest > ddp[0].largest,
                f"{zero2[0].largest} against {ddp[0].largest} (published: 200 against 100)"),
        Finding("ZeRO-2 fits a larger evaluation batch than DDP", zero2[1].largest > ddp[1].largest,
                f"{zero2[1].largest} against {ddp[1].largest} (published: 100 against 50)"),
    ]  # fmt: skip
    for named, words in (
        ("ZeRO-2", "if each has its own batch, as published"),
        ("ZeRO-2, with DDP's batch", "with the same batch"),
    ):
        if "DDP" in found and named in found and found["DDP"].fits and found[named].fits:
            a, b = found["DDP"], found[named]
            printed = " (published: 19.06 against 27.36)" if named == "ZeRO-2" else ""
            cause = (
                f"{b.training:.1f} s against {a.training:.1f} s{printed}. A step takes {b.step:.2f} s against {a.step:.2f} s, "
                f"and the epochs have {len(b.steps)} and {len(a.steps)} steps"
            )
            claims.append(Finding(f"ZeRO-2's epoch is shorter {words}", b.training < a.training, cause))
    return claims


def _refusals(fits: dict[str, tuple[Search, Search]]) -> list[str]:
    return [
        f"{arm}, {what} of {search.refused}: `{search.why}`"
        for arm, pair in fits.items()
        for what, search in zip(("training batch", "evaluation batch"), pair, strict=True)
        if search.refused is not None
    ]

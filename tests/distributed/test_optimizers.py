"""Every optimizer trains as in one process under every strategy that can hold it, and its checkpoints go on under others."""

from __future__ import annotations

import pytest

from recipes.causal_lm import CausalLM, CausalLMConfig
from tests.distributed.test_parity import STRATEGIES, largest_difference, record, weight_differences
from tests.harness import ROOT, launch, read_tensors
from zerobook.config_sources import ConfigSources
from zerobook.plan.hardware import cluster
from zerobook.plan.job import make_job
from zerobook.plan.rows import resolve_launch_plan
from zerobook.plan.sharding import sharding_spec
from zerobook.plan.state_bytes import count_states

TOLERANCE = 1e-6
"""Relative, on every step's loss and norm, in fp32."""
TOLERANCES = {"adamw_8bit": 1e-4}
"""An 8-bit moment has 256 values. A sum in another order can move it to the next value, which changes it by hundredths."""
RATES = {"sgd": 0.1, "adafactor": 3e-2, "adamw_8bit": 3e-3}
HELD_BY = {
    "sgd": ["ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp", "fsdp_offload", "fsdp_hybrid"],
    "adafactor": ["ddp"],
    "adamw_8bit": ["ddp"],
}
SAMPLE = [("sgd", "zero3"), ("adafactor", "ddp")]


def cases():
    for optimizer, strategies in HELD_BY.items():
        for strategy in strategies:
            marks = [] if (optimizer, strategy) in SAMPLE else [pytest.mark.full]
            yield pytest.param(optimizer, strategy, marks=[pytest.mark.launch, *marks], id=f"{optimizer}-{strategy}")


@pytest.mark.parametrize("optimizer, strategy", list(cases()))
def test_same_training_as_one_process(launches, optimizer, strategy):
    processes, flags = STRATEGIES[strategy], {"optimizer": optimizer, "learning_rate": RATES[optimizer]}
    one = launches("single", 1, 4, 1, **flags)
    run = launches(strategy, processes, 4 // processes, 1, save_steps=5, **flags)
    loss, norm = largest_difference(run.losses, one.losses), largest_difference(run.norms, one.norms)
    ours, reference = run.state(), one.state()
    record("parity", strategy=strategy, recipe=f"causal_lm, {optimizer}", processes=processes, loss=loss, norm=norm,
           held_out=None, weight=weight_differences(ours, reference)[0], fall=1 - run.losses[-1] / run.losses[0], model="llama",
           rate=RATES[optimizer], epsilon=None)  # fmt: skip
    tolerance = TOLERANCES.get(optimizer, TOLERANCE)
    assert loss < tolerance and norm < tolerance and run.losses[-1] < 0.9 * run.losses[0]
    assert {name.partition("/")[0] for name in ours} == {name.partition("/")[0] for name in reference}
    for name, tensor in reference.items():
        assert (ours[name] - tensor).abs().max() < 20 * tolerance * max(1, tensor.abs().max()), name
    assert_planned(run, strategy, processes)


def assert_planned(run, strategy, processes):
    """Each rank holds to the byte the optimizer state that was planned for it."""
    config = CausalLMConfig(**run.event("run_start")["config"])
    planned, where = make_job(CausalLM(config)), cluster(gpus=str(processes), gpu="a100-80gb")
    sources = ConfigSources(dict.fromkeys(type(config).model_fields, "default"))
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    spreads = sharding_spec(resolve_launch_plan(file, where, config, sources), planned.model_config)
    held = [count_states(planned.weights(), spreads, rank).live.optimizer for rank in range(processes)]
    assert [rank["optimizer"] for rank in run.event("memory")["per_rank_bytes"]] == held


RESUMED = [("sgd", "zero3", "fsdp"), ("sgd", "zero3", "ddp"), ("sgd", "fsdp", "zero2"), ("sgd", "zero1", "zero3"),
           ("sgd", "ddp", "fsdp_hybrid"), ("adafactor", "ddp", "single"), ("adamw_8bit", "ddp", "single")]  # fmt: skip


@pytest.mark.launch
@pytest.mark.parametrize(
    "optimizer, writer, reader",
    [pytest.param(*case, marks=[] if case in (RESUMED[0], RESUMED[5]) else [pytest.mark.full])
     for case in RESUMED],
)  # fmt: skip
def test_a_checkpoint_goes_on_under_another_strategy(launches, tmp_path, optimizer, writer, reader):
    flags = {"optimizer": optimizer, "learning_rate": RATES[optimizer]}
    whole = launches(writer, STRATEGIES[writer], 4 // STRATEGIES[writer], 1, save_steps=5, **flags)
    start = whole.event("run_start")["config"]
    keys = ("model_name_or_path", "train_file", "max_train_samples", "block_size", "learning_rate", "optimizer", "cache_dir",
            "validation_split_percentage", "per_device_train_batch_size", "max_train_steps", "num_warmup_steps", "weight_decay",
            "logging_steps")  # fmt: skip
    checkpoint = whole.output / "checkpoints" / "step-000005"
    run = launch(reader, STRATEGIES[reader], "causal_lm", tmp_path / "run", resume_from_checkpoint=checkpoint,
                 **{key: start[key] for key in keys})  # fmt: skip
    assert [s["step"] for s in run.steps] == [6, 7, 8, 9, 10]
    tolerance = TOLERANCES.get(optimizer, TOLERANCE)
    assert largest_difference(run.losses, whole.losses[5:]) < tolerance
    assert largest_difference(run.norms, whole.norms[5:]) < 10 * tolerance


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=pytest.mark.full),
                                      pytest.param("zero3", marks=pytest.mark.full)])  # fmt: skip
def test_an_optimizer_that_needs_whole_weights_is_refused_by_the_launch(tiny, tmp_path, strategy):
    run = launch(strategy, 2, "causal_lm", tmp_path / "run", model_name_or_path=tiny / "llama",
                 train_file=tiny / "chats.jsonl", optimizer="adafactor", expect=None)  # fmt: skip
    assert run.returncode and "optimizer: adafactor needs whole weights" in run.text and not run.steps


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.full) for name in ("ddp", "zero2", "zero3", "zero2_offload"))]
)
def test_steps_that_are_not_finite_leave_the_weights_as_they_are(launches, tmp_path, strategy):
    """A gradient on rank 1 is not a number from the eighth step on: the model at the end is that of the seventh."""
    from safetensors.torch import load_file

    run = launches(
        strategy, 2, 2, 1, optimizer="sgd", learning_rate=RATES["sgd"], save_steps=7, on_spike="log",
        through=ROOT / "tests" / "distributed" / "faults.py", environment={"ZEROBOOK_FAULT": "nan", "ZEROBOOK_FAULT_AT": 8},
    )  # fmt: skip
    assert [step["step"] for step in run.steps if step["grad_norm"] is None] == [8, 9, 10]
    (checkpoint,) = (run.output / "checkpoints").glob("step-*")
    saved, final = read_tensors(checkpoint), load_file(run.output / "model" / "model.safetensors")
    assert checkpoint.name == "step-000007" and len(final) == sum(name.startswith("weight/") for name in saved)
    for name, weight in final.items():
        assert (weight == saved[f"weight/{name}"]).all(), name

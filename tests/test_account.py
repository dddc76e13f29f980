"""The account of a strategy file: the effect of each key, and that no key is left out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT
from tests.strategy_corpus import CORPUS, DEEPSPEED, FSDP, ZERO2, ZERO3, Case, fsdp
from tests.test_strategy_corpus import written
from tests.versions import shipped_strategies
from zerobook.cli.doctor import doctor, inspect_launch
from zerobook.launch import account, deepspeed_keys
from zerobook.launch.resolve import Hardware


def resolved(file: str, processes: int, folder: Path, *flags: str, launcher: tuple[str, ...] = ()):
    """Return (plan, its account) of a launch of `causal_lm` without problems."""
    launch = ["--config_file", file, "--num_processes", str(processes), *launcher]
    recipe = [str(ROOT / "recipes" / "causal_lm.py"), "--train_file", str(ROOT / "README.md"), "--format", "text"]
    plan, problems, config, sources = inspect_launch(
        [*launch, *recipe, "--model_name_or_path", "gpt2", "--output_dir", str(folder / "run"), *flags], Hardware()
    )
    assert plan is not None and not problems + plan.problems
    return plan, account.entries(plan, config, sources, flags=[*launch, "x.py"])


def leaves(content: dict, path: str = ""):
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


ACCEPTED = [name for name, case in CORPUS.items() if case.said is None and "layer's class" not in name]


@pytest.fixture(autouse=True)
def no_accelerator_chosen(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", [*ACCEPTED, *shipped_strategies()])
def test_every_key_of_the_files_is_in_the_account_once(name, tmp_path):
    if name in CORPUS:
        file, processes, flags = written(tmp_path, CORPUS[name]), CORPUS[name].processes, CORPUS[name].flags
    else:
        file, processes, flags = f"accelerate_configs/{name}.yaml", 1 if name == "single" else 4, ()
    plan, entries = resolved(file, processes, tmp_path, *flags)
    said = Counter((entry.source, entry.key) for entry in entries)
    expected = Counter((file, key) for key in leaves(yaml.safe_load(Path(file).read_text())))
    if plan.config_file and Path(plan.config_file).is_file():
        expected += Counter((plan.config_file, key) for key in leaves(deepspeed_keys.load(plan.config_file, [])))
    assert said == expected
    assert all(re.match("used|filled in: |overridden: |no effect: ", entry.effect) for entry in entries)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_key_of_the_yaml_without_effect_changes_nothing(name, tmp_path):
    case = CORPUS[name]
    file = written(tmp_path, case)
    plan, entries = resolved(file, case.processes, tmp_path, *case.flags)
    idle = [entry.key for entry in entries if entry.source == file and entry.effect.startswith("no effect")]
    content = yaml.safe_load(Path(file).read_text())
    for key in idle:
        *above, leaf = key.split(".")
        inside = content
        for step in above:
            inside = inside[step]
        del inside[leaf]
    Path(file).write_text(yaml.safe_dump(content))
    assert idle and resolved(file, case.processes, tmp_path, *case.flags)[0].record() == plan.record()


FSDP_1 = fsdp(fsdp_use_orig_params=True)
STAGE_2 = {"stage": 2, "stage3_max_live_parameters": 1e9}
STAGE_3 = {
    "stage": 3, "reduce_bucket_size": "auto",
    "offload_param": {"device": "none", "pin_memory": True},
}  # fmt: skip
SCHEDULE = Case(
    DEEPSPEED,
    ZERO2 | {"scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"}}},
    flags=("--num_warmup_steps", "2"),
)  # fmt: skip


def adam(kind: str, **params) -> Case:
    return Case(DEEPSPEED, ZERO2 | {"optimizer": {"type": kind, "params": params}})


EFFECTS = {
    "the number of processes": (Case(FSDP), "num_processes", "used"),
    "FSDP 1": (Case(FSDP_1), "fsdp_config.fsdp_use_orig_params", "no effect: FSDP2 always"),
    "another strategy": (
        Case(FSDP | {"deepspeed_config": {"zero_stage": 3}}), "deepspeed_config.zero_stage",
        "no effect: the strategy is FSDP2"),
    "stage 2": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_2}), "zero_optimization.stage3_max_live_parameters",
        "no effect: the stage is 2"),
    "stage 3": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_3 | {"round_robin_gradients": True}}),
        "zero_optimization.round_robin_gradients", "no effect: the stage is 3"),
    "a setting that mixes up the weights": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_2 | {"round_robin_gradients": True}}),
        "zero_optimization.round_robin_gradients", "overridden: false"),
    "known with the model": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_3}), "zero_optimization.reduce_bucket_size",
        "filled in: when the model"),
    "offload to none": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_3}), "zero_optimization.offload_param.pin_memory",
        "no effect: the device is none"),
    "another precision": (
        Case(DEEPSPEED, ZERO2 | {"fp16": {"enabled": "auto", "loss_scale": 0}}), "fp16.loss_scale",
        "no effect: the precision is no"),
    "auto": (
        Case(DEEPSPEED, ZERO2 | {"gradient_clipping": "auto"}), "gradient_clipping",
        "filled in: 1.0, max_grad_norm from default"),
    "a number": (Case(DEEPSPEED, ZERO2 | {"gradient_clipping": 0.3}), "gradient_clipping", "used"),
    "no clipping": (Case(DEEPSPEED, ZERO2 | {"gradient_clipping": 0.0}), "gradient_clipping", "used"),
    "DeepSpeed's checkpoints": (
        Case(DEEPSPEED, ZERO3 | {"checkpoint": {"tag_validation": "Warn"}}), "checkpoint.tag_validation",
        "no effect: checkpoints"),
    "a schedule of auto": (CORPUS["a schedule of auto"], "scheduler.type", "filled in: linear, lr_scheduler_type from"),
    "the length of a schedule": (SCHEDULE, "scheduler.params.total_num_steps", "filled in: when the model"),
    "an empty schedule": (Case(DEEPSPEED, ZERO2 | {"scheduler": {}}), "scheduler", "no effect: it is empty"),
    "stage 2, without the prefix": (
        Case(DEEPSPEED, {"zero_optimization": {"stage": 2, "max_live_parameters": 1e9}}),
        "zero_optimization.max_live_parameters", "no effect: the stage is 2"),
    "stage 3, without the prefix": (
        Case(DEEPSPEED, {"zero_optimization": {"stage": 3, "max_live_parameters": 1e9}}),
        "zero_optimization.max_live_parameters", "used"),
    "weights of DeepSpeed's own files": (
        Case(DEEPSPEED, {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}}),
        "zero_optimization.gather_16bit_weights_on_model_save", "no effect: checkpoints"),
    "AdamW without its decay": (
        adam("AdamW", adam_w_mode=False), "optimizer.params.adam_w_mode", "no effect: the type is AdamW"),
    "Adam with another decay": (adam("Adam", adam_w_mode=False, weight_decay=0.1), "optimizer.params.adam_w_mode", "used"),
    "tokens that are not split": (
        Case(DEEPSPEED, ZERO3 | {"seq_parallel_communication_data_type": "fp32"}), "seq_parallel_communication_data_type",
        "no effect: parallelism_config_sp_size is 1"),
    "offload as it was written once": (
        CORPUS["offload as it was written once"], "zero_optimization.cpu_offload", "used: read as offload_optimizer"),
    "bf16 as it was written once": (
        Case(DEEPSPEED, ZERO2 | {"bfloat16": {"enabled": True}}), "bfloat16.enabled", "used: read as bf16"),
    "hybrid sharding of FSDP 1": (
        Case(fsdp(fsdp_sharding_strategy="HYBRID_SHARD")), "fsdp_config.fsdp_sharding_strategy",
        "no effect: FSDP2 has fsdp_reshard_after_forward"),
    "activation checkpointing": (
        Case(fsdp(fsdp_activation_checkpointing=False), flags=("--activation_checkpointing", "full")),
        "fsdp_config.fsdp_activation_checkpointing", "overridden: full"),
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_effects(name, tmp_path):
    case, key, expected = EFFECTS[name]
    _, entries = resolved(written(tmp_path, case), case.processes, tmp_path, *case.flags)
    assert next(entry.effect for entry in entries if entry.key == key).startswith(expected)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"classes": ["GPT2Block"]}, "used"),
        ({"classes": ["MixtralSparseMoeBlock"]}, "no effect: the model has no such module"),
        ({"names": "transformer.h.0"}, "used"),
        ({"names": ["model.layers.0"]}, "no effect: the model has no such module"),
        ({"name_suffixes": ["mlp", "experts"]}, "used, without experts"),
    ],
)
def test_leaves_are_looked_for_in_the_model(lists, expected, tmp_path, tiny):
    file = written(tmp_path, Case(DEEPSPEED, {"zero_optimization": {"stage": 3, "leaf_module": lists}}))
    _, entries = resolved(file, 2, tmp_path, "--model_name_or_path", str(tiny / "gpt2"))
    assert next(entry.effect for entry in entries if "leaf_module" in entry.key).startswith(expected)


def test_a_flag_of_the_launcher_overrides_the_file(tmp_path):
    file = written(tmp_path, Case(FSDP | {"mixed_precision": "bf16"}))
    _, entries = resolved(file, 4, tmp_path, launcher=("--mixed_precision", "no"))
    said = {entry.key: entry.effect for entry in entries}
    assert said["mixed_precision"] == "overridden: --mixed_precision no"
    assert said["num_processes"] == "overridden: --num_processes 4"


def test_a_device_by_variable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    plan, problems, _, _ = inspect_launch(["--config_file", written(tmp_path, Case(FSDP)), "--num_processes", "2"], Hardware())
    assert plan is not None and not problems and len(plan.problems) == 1 and "LOCAL_RANK" in plan.problems[0]


def test_doctor_prints_the_account(tmp_path, capsys):
    assert doctor(["--config_file", written(tmp_path, Case(FSDP_1)), "--num_processes", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fsdp_use_orig_params" in out and "FSDP2 always keeps" in out


@pytest.mark.parametrize("section, empty", [("deepspeed_config", []), ("deepspeed_config", {}), ("fsdp_config", [])])
def test_an_empty_section_is_in_the_account(section, empty, tmp_path):
    file = tmp_path / "empty.yaml"
    shipped = yaml.safe_load((ROOT / "accelerate_configs" / "ddp.yaml").read_text())
    file.write_text(yaml.safe_dump(shipped | {section: empty}))
    _, entries = resolved(str(file), 2, tmp_path)
    assert section in {entry.key for entry in entries}

"""The account of a strategy file: the effect of each key, and that no key is left out."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT
from tests.strategy_corpus import CORPUS, DEEPSPEED, FSDP, ZERO2, ZERO3, Case, fsdp
from tests.test_strategy_corpus import written
from zerobook.cli.doctor import doctor, inspect_launch
from zerobook.launch import accelerate_file, account, deepspeed_keys
from zerobook.launch.resolve import Hardware
from zerobook.launch.variables import VARIABLES
from zerobook.launch.worker_environment import worker_environment


def resolved(file: str, processes: int, folder: Path, *flags: str, launcher: tuple[str, ...] = ()):
    """Return (plan, its account) of a launch of `causal_lm` without problems."""
    launch = ["--config_file", file, "--num_processes", str(processes), *launcher]
    recipe = [str(ROOT / "recipes" / "causal_lm.py"), "--train_file", str(ROOT / "README.md"), "--format", "text"]
    plan, problems, config, sources = inspect_launch(
        [*launch, *recipe, "--model_name_or_path", "gpt2", "--output_dir", str(folder / "run"), *flags], Hardware()
    )
    assert plan is not None and not problems + plan.problems
    environ, _ = worker_environment(launch)
    return plan, account.entries(plan, config, sources, flags=[*launch, "x.py"], given=os.environ, environ=environ)


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


@pytest.mark.parametrize("name", [*ACCEPTED, *sorted(file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml"))])
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
    "stage": 3, "round_robin_gradients": True, "reduce_bucket_size": "auto",
    "offload_param": {"device": "none", "pin_memory": True},
}  # fmt: skip
EFFECTS = {
    "the number of processes": (Case(FSDP), "num_processes", "used"),
    "one machine": (Case(FSDP), "machine_rank", "no effect: there is one machine"),
    "FSDP 1": (Case(FSDP_1), "fsdp_config.fsdp_use_orig_params", "no effect: FSDP2 always"),
    "another strategy": (
        Case(FSDP | {"deepspeed_config": {"zero_stage": 3}}), "deepspeed_config.zero_stage",
        "no effect: distributed_type is FSDP"),
    "stage 2": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_2}), "zero_optimization.stage3_max_live_parameters",
        "no effect: the stage is 2"),
    "stage 3": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_3}), "zero_optimization.round_robin_gradients",
        "no effect: the stage is 3"),
    "known with the model": (
        Case(DEEPSPEED, {"zero_optimization": STAGE_3}), "zero_optimization.reduce_bucket_size",
        "filled in: from the model's size"),
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
    "activation checkpointing": (
        Case(fsdp(fsdp_activation_checkpointing=False), flags=("--activation_checkpointing", "full")),
        "fsdp_config.fsdp_activation_checkpointing", "overridden: full"),
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_effects(name, tmp_path):
    case, key, expected = EFFECTS[name]
    _, entries = resolved(written(tmp_path, case), case.processes, tmp_path, *case.flags)
    assert next(entry.effect for entry in entries if entry.key == key).startswith(expected)


def test_a_flag_of_the_launcher_overrides_the_file(tmp_path):
    file = written(tmp_path, Case(FSDP | {"mixed_precision": "bf16"}))
    _, entries = resolved(file, 4, tmp_path, launcher=("--mixed_precision", "no"))
    said = {entry.key: entry.effect for entry in entries}
    assert said["mixed_precision"] == "overridden: --mixed_precision no"
    assert said["num_processes"] == "overridden: --num_processes 4"


def test_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    _, entries = resolved(written(tmp_path, Case(FSDP)), 2, tmp_path)
    said = {entry.key: entry.effect for entry in entries if entry.source == "environment"}
    assert said["ACCELERATE_MIXED_PRECISION"] == "overridden: accelerate launch sets no"
    assert said["ACCELERATE_DEBUG_MODE"] == "used" and said["FSDP_STATE_DICT_TYPE"].startswith("no effect")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ACCELERATE_MIXD_PRECISION", "Did you mean ACCELERATE_MIXED_PRECISION?"),
        ("ACCELERATE_USE_MEGATRON_LM", "do not run under Megatron-LM"),
        ("ACCELERATE_TORCH_DEVICE", "LOCAL_RANK"),
    ],
)  # fmt: skip
def test_variables_that_are_problems(name, said, tmp_path, monkeypatch):
    monkeypatch.setenv(name, "true")
    monkeypatch.setenv("ACCELERATE_OF_SOMEBODY_ELSE", "true")
    plan, problems, _, _ = inspect_launch(["--config_file", written(tmp_path, Case(FSDP)), "--num_processes", "2"], Hardware())
    assert plan is not None and not problems and len(plan.problems) == 1 and said in plan.problems[0]


def test_every_key_of_the_installed_accelerate_has_been_looked_at():
    """If this fails, a new version has another key or variable: see what it does, and enter it where it belongs."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    listed = account.USED_KEYS | account.SEVERAL_MACHINES | set(account.UNUSED)
    flags = {action.dest for action in launch_command_parser()._actions}
    inside = {
        flag
        for flag in flags
        if flag.startswith(("fsdp_", "parallelism_config_", "deepspeed_", "zero", "offload_", "gradient_"))
    }
    known = set(ClusterConfig.__dataclass_fields__) | inside
    assert known <= listed and listed - known <= accelerate_file.OWN
    import accelerate

    source = [file.read_text() for file in Path(accelerate.__file__).parent.rglob("*.py")]
    named = {name for text in source for name in re.findall(r"[\"'](ACCELERATE_[A-Z0-9_]*[A-Z0-9])[\"']", text)}
    assert named <= set(VARIABLES)


def test_doctor_prints_the_account(tmp_path, capsys):
    assert doctor(["--config_file", written(tmp_path, Case(FSDP_1)), "--num_processes", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fsdp_use_orig_params" in out and "FSDP2 always keeps" in out

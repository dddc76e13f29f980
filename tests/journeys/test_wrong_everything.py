"""A journey: everything that can be typed wrongly, in a folder outside the clone. Each error names its way out."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import psutil
import pytest

from tests.harness import REFUSED, ROOT, SETTINGS, run_here, sampled

RECIPE, LORA = ROOT / "recipes" / "causal_lm.py", ROOT / "recipes" / "lora_finetune.py"
GOOD = "--model_name_or_path {tiny}/llama --train_file good.jsonl --block_size 32 --output_dir run"
MISTAKES = {
    "a flag": (RECIPE, GOOD + " --lerning_rate 1", r"--lerning_rate: no such flag. Did you mean --learning_rate"),
    "another trainer's flag": (RECIPE, GOOD + " --optim adamw", r"--optim: no such flag. Did you mean --optimizer"),
    "a boolean": (RECIPE, GOOD + " --config wrong.yaml", r"learning_rate: got True \(from wrong.yaml\), expected a number"),
    "a key": (RECIPE, GOOD + " --config key.yaml", r"key.yaml: sede: no such key. Did you mean seed"),
    "no config": (
        RECIPE,
        "--config gone.yaml",
        r"^ConfigError: gone.yaml: the config cannot be read \(No such file",
    ),
    "no data": (RECIPE, "--model_name_or_path {tiny}/llama", r"no training data is named. Give --dataset_name"),
    "no such file": (RECIPE, GOOD.replace("good", "gone"), r"train_file: no such file or folder: gone.jsonl"),
    "no such model": (RECIPE, GOOD.replace("{tiny}/llama", "./gone"), r"model_name_or_path: no such file or folder: ./gone"),
    "a broken line": (RECIPE, GOOD.replace("good", "bad"), r"line 2: not valid JSON"),
    "preferences": (RECIPE, GOOD.replace("good", "preferences"), r"this is preference data"),
    "an empty folder": (RECIPE, GOOD.replace("{tiny}/llama", "empty"), r"neither config.json \(a model\) nor"),
    "a tracker": (RECIPE, GOOD + " --report_to clearml", r"clearml is not installed. Run: pip install clearml"),
    "a global batch": (RECIPE, GOOD + " --global_batch_size 9", r"global_batch_size: 9 is no multiple of 8"),
    "no patience": (RECIPE, GOOD + " --early_stopping_patience 2", r"early_stopping_patience: .* Give --eval_steps"),
    "a pattern": (LORA, GOOD.replace("--block_size 32", "") + " --lora_target_modules *_proj", r"is no regular expression"),
    "a target": (LORA, GOOD.replace("--block_size 32", "") + " --lora_target_modules q_porj", r"Its linear layers: .*q_proj"),
    "another run's folder": (RECIPE, GOOD.replace("run", "full"), r"full/model exists already"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_way_out(tmp_path, tiny, monkeypatch, capsys, name):
    recipe, flags, says = MISTAKES[name]
    (tmp_path / "good.jsonl").write_text('{"text": "one two three four five six seven eight nine ten"}\n' * 40)
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "preferences.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "wrong.yaml").write_text("learning_rate: true\n")
    (tmp_path / "key.yaml").write_text("sede: 1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "model").mkdir(parents=True)
    (tmp_path / "full" / "model" / "config.json").write_text("{}")
    words = [word.format(tiny=tiny) for word in flags.split()]
    monkeypatch.chdir(tmp_path)

    code, output = run_here(recipe, words, monkeypatch, capsys)

    said = " ".join(output.split())
    assert code == 2 and re.search(says, said), said
    assert "Traceback" not in said


@pytest.mark.launch
@pytest.mark.parametrize("processes, logs", sampled([(2, []), (1, []), (2, ["--tee", "3", "--log_dir"])], (2, [])))
def test_a_refusal_ends_the_launch_with_its_own_lines(tmp_path, tiny, processes, logs):
    """accelerate's launcher would add 40 lines. With --tee it prints what its processes write, so it is not ended early."""
    (tmp_path / "good.jsonl").write_text('{"text": "one two three"}\n')
    strategy = ROOT / "accelerate_configs" / ("ddp.yaml" if processes > 1 else "single.yaml")
    launcher = ["--config_file", str(strategy), "--num_processes", str(processes), "--main_process_port", "0", *logs]
    launcher += [str(tmp_path / "logs")] if logs else []
    flags = f"--model_name_or_path {tiny}/llama --train_file god.jsonl --lerning_rate 1 --dtype bf16"
    line = [sys.executable, "-m", "accelerate.commands.launch", *launcher, str(RECIPE), *flags.split()]
    launch = subprocess.Popen(
        line, cwd=tmp_path, env=os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    told, _ = launch.communicate(timeout=120)

    for hint in ("--learning_rate?", "bfloat16?", "good.jsonl?"):
        assert hint in told
    family = [process for process in psutil.process_iter() if os.getsid(process.pid) == launch.pid]
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    if logs:
        assert launch.returncode == 1
    else:
        lines = [line for line in told.splitlines() if line]
        assert launch.returncode == REFUSED and len(lines) == 4, told

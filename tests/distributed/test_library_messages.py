"""The output of a launch is about the run: no notices of libraries, and no line once a rank."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from tests.harness import ROOT, launch, sampled

NOTICES = re.compile(
    r"warn|deprecat|site-packages|built successfully|torch/distributed|Failed to load|\[(INFO|WARNING)\]", re.IGNORECASE
)


CASES = [
    ("fsdp", {"mixed_precision": "bf16"}),
    ("zero3", {}),
    ("ddp", {"load_in_4bit": True}),
    ("zero2_offload", {}),
]


@pytest.mark.launch
@pytest.mark.parametrize("strategy, flags", sampled(CASES, CASES[0]))
def test_libraries_print_nothing(tiny, tmp_path, strategy, flags):
    run = launch(
        strategy, 2, "lora_finetune", tmp_path / "run", model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl",
        max_seq_length=64, max_train_steps=2, save_steps=1, per_device_train_batch_size=2, **flags,
    )  # fmt: skip
    lines = [line.strip() for line in re.split(r"[\r\n]+", run.text) if line.strip()]
    assert [line for line in lines if NOTICES.search(line)] == []
    twice = {line for line, times in Counter(lines).items() if times > 1 and "it/s" not in line and "step/s" not in line}
    assert twice == set()


@pytest.mark.launch
@pytest.mark.full
def test_the_quiet_launcher_prints_nothing_of_its_own(tiny, tmp_path):
    import subprocess
    import sys

    line = [
        sys.executable, "-m", "zerobook.cli.main", "launch", "--config_file", ROOT / "accelerate_configs" / "zero2.yaml",
        "--num_processes", "1", "--main_process_port", "0", ROOT / "recipes" / "lora_finetune.py", "--model_name_or_path",
        tiny / "llama", "--train_file", tiny / "chats.jsonl", "--max_seq_length", "64", "--max_train_steps", "1",
        "--output_dir", tmp_path / "run",
    ]  # fmt: skip
    free = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # the launcher has words about it
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, timeout=240, env=free)
    assert done.returncode == 0, done.stderr
    lines = re.split(r"[\r\n]+", done.stdout + done.stderr)
    assert [line for line in lines if NOTICES.search(line)] == []

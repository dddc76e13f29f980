"""A journey: somebody's own chats, from the file to an answer, in a folder outside the clone."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from tests.harness import ROOT, SETTINGS

ENVIRONMENT = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def shell(tmp_path):
    """Returns a function that runs a line as typed in a folder of one's own, where ``zerobook init`` has made the files."""

    def run(line: str, *, code: int = 0, text: str | None = None) -> str:
        words = shlex.split(line)
        program = {"zerobook": "zerobook.cli.main", "accelerate": "accelerate.commands.accelerate_cli"}[words[0]]
        done = subprocess.run([sys.executable, "-m", program, *words[1:]], cwd=tmp_path / "mine", env=ENVIRONMENT, input=text,
                              capture_output=True, text=True, timeout=240, check=False)  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    (tmp_path / "mine").mkdir()
    run("zerobook init .")
    return run


def chats(file, count):
    rows = []
    for number in range(count):
        turns = [("user", f"What comes after {number}?"), ("assistant", f"{number + 1} comes after {number}.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    rows.append(rows[0])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.launch
@pytest.mark.full
def test_own_chats_become_a_model_that_is_continued_and_talked_to(tmp_path, tiny, shell):
    mine, model = tmp_path / "mine", tiny / "llama"
    chats(mine / "chats.jsonl", 24)
    said = shell(f"zerobook data inspect chats.jsonl --model {model} --max_seq_length 96")
    assert "format messages; 25 samples" in said and "line 25 (as line 1)" in said
    planned = shell("zerobook plan --gpus 2 --gpu_memory 8GB --strategies zero2,ddp --recommend recipes/lora_finetune.py "
                    f"--model_name_or_path {model} --train_file chats.jsonl --max_seq_length 96")  # fmt: skip
    line = planned.rstrip().splitlines()[-1].strip()
    assert line.startswith("accelerate launch --config_file accelerate_configs/")
    line = line.replace("--mixed_precision bf16", "")  # this machine's CPUs compute in fp32
    more = "--per_device_train_batch_size 2 --max_train_steps 4 --save_steps 2 --eval_steps 2 --logging_steps 1"
    trained = shell(f"{line} {more} --output_dir runs/first")
    assert "trained parameters: " in trained
    # the run's folder is the name of what it has made
    second = line.replace(str(model), "runs/first") + f" {more} --output_dir runs/second"
    again = shell(second)
    assert re.search(r"runs/first/adapter is an adapter for .*; it is trained further", " ".join(again.split()))
    adapter = json.loads((mine / "runs/second/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(model)
    for name in ("runs/second", "runs/second/adapter", "runs/second/checkpoints/step-000002"):
        assert shell(f"zerobook chat {name} --max_new_tokens 4", text="What comes after 3?\n")
    shell("zerobook export runs/second --output merged")
    shell("zerobook export runs/second --keep_adapter --output alone")
    for folder, library in (("merged", "transformers"), ("alone", "peft")):
        card = ModelCard.load(mine / folder / "README.md")
        assert card.data.library_name == library and card.data.tags == ["zerobook", "lora"] and not card.data.base_model
        assert str(tmp_path) not in card.text and str(tiny) not in card.text, "no path of this machine"
        assert "| events | 1 attempts, 0 alarms" in card.text and "| held-out loss | " in card.text
        (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
        code = code.replace("FOLDER_OR_NAME", folder) + "\nprint(type(model).__name__, len(tokenizer))\n"
        done = subprocess.run([sys.executable, "-c", code], cwd=mine, env=ENVIRONMENT, capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip
        assert ("Peft" if library == "peft" else "LlamaForCausalLM") in done.stdout, done.stderr
    shell("zerobook chat merged --max_new_tokens 4", text="What comes after 3?\n")
    assert "Finished: step 4 of 4" in shell("zerobook runlog status runs/second")
    listed = shell("zerobook checkpoint list runs/second --json")
    assert [one["progress"]["step"] for one in json.loads(listed)] == [2, 4] and any(one["best"] for one in json.loads(listed))
    assert "zerobook chat runs/second" in again and "watch it: zerobook runlog report runs/second" in again
    assert "held-out loss" in shell("zerobook runlog report runs/second") or (mine / "runs/second/runlog/report.html").exists()

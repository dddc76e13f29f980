"""Demonstration of spike handling as one command: a run with bad rows in its data recovers, and its runlog shows how.

A small Llama learns dialogues from scratch under ZeRO-2 on two CPU processes. The rows that eight of its steps will use
have answers that are not language. The run detects the spike, rolls back, finds that the spike occurs again, skips those
rows, and ends as if they had never been there. For comparison, the same data is trained without rollbacks, and then without
the bad rows.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "outputs" / "demo-spike"
STEPS = 100
BATCH = 8
FIRST_BAD_STEP = 76
LAST_BAD_STEP = 83
SEED = 42
COMMAND = (
    "accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 --main_process_port 0 "
    "recipes/causal_lm.py --model_name_or_path outputs/demo-spike/model --train_file outputs/demo-spike/{data}.jsonl "
    "--validation_file outputs/demo-spike/held-out.jsonl --block_size 64 --per_device_train_batch_size 4 "
    "--learning_rate 8e-3 --num_warmup_steps 10 --max_train_steps {steps} --save_steps 20 --logging_steps 5 --seed {seed} "
    "--on_spike {policy} --output_dir outputs/demo-spike/{name}"
)


def main() -> int:
    start = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    title("1. Dialogues, eight steps' worth of them spoilt")
    make_model()
    bad_rows = make_data()
    title("2. Training on them, with the spike monitor that every run has")
    run("mended", "spoilt", "rollback")
    title("3. The same, while the monitor only logs")
    run("harmed", "spoilt", "log")
    title("4. The same without the spoilt rows")
    run("clean", "sound", "rollback")
    title("5. The runlog tells the story")
    command = [str(Path(sys.executable).with_name("zerobook")), "runlog", "show", str(OUTPUT / "mended")]
    print("$ zerobook runlog show outputs/demo-spike/mended", flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    is_as_expected = report(bad_rows)
    print(f"\nThe page: {OUTPUT / 'mended' / 'runlog' / 'report.html'}\n{time.monotonic() - start:.0f} s in all")
    return 0 if is_as_expected else 1


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n=== {text}", flush=True)


def make_model() -> None:
    """Write a model of two layers of the real class with random weights, and SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from zerobook.data import embedded
    from zerobook.utils.files import modes_by_umask

    tokenizer = AutoTokenizer.from_pretrained(embedded.smollm2())
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(OUTPUT / "model")
    tokenizer.save_pretrained(OUTPUT / "model")
    modes_by_umask(OUTPUT / "model")


def make_data() -> set[int]:
    """Write the dialogues twice, unchanged and with some spoilt answers. Return the numbers of the spoilt rows."""
    import numpy as np

    from zerobook.data import embedded
    from zerobook.data.sampler import Permutation

    chats = []
    for row in embedded.rows("chatterbot"):
        lengths = [len(message["content"]) for message in row["messages"]]
        if len(lengths) == 2 and min(lengths) > 5 and max(lengths) < 100:
            chats.append(row["messages"])
    rng = random.Random(SEED)
    rng.shuffle(chats)
    held_out = chats[:120]
    train = chats[120:]
    # The rows that a run takes in these steps follow from the seed.
    positions = np.arange((FIRST_BAD_STEP - 1) * BATCH, LAST_BAD_STEP * BATCH)
    order = Permutation(len(train), seed=SEED, epoch=0)
    bad_rows = {int(row) for row in order(positions)}
    words = ["zyx", "qqq", "##", "}{", "\u00e6\u00e6", "0x0"]
    spoilt = []
    for number, chat in enumerate(train):
        noise = " ".join(rng.choice(words) for _ in range(40))
        if number in bad_rows:
            chat = [chat[0], {"role": "assistant", "content": noise}]
        spoilt.append(chat)
    for name, rows in (("sound", train), ("spoilt", spoilt), ("held-out", held_out)):
        lines = [json.dumps({"messages": chat}) + "\n" for chat in rows]
        (OUTPUT / f"{name}.jsonl").write_text("".join(lines))
    print(
        f"{len(train)} dialogues to train on, {len(held_out)} held out. The {len(bad_rows)} that steps {FIRST_BAD_STEP} to "
        f"{LAST_BAD_STEP} take get answers like {' '.join(words)}"
    )
    return bad_rows


def run(name: str, data: str, policy: str) -> None:
    """Train on a file of `make_data`, with this ``--on_spike``. ``name`` is that of the output folder."""
    line = COMMAND.format(name=name, data=data, policy=policy, steps=STEPS, seed=SEED)
    print(f"$ {line}\n", flush=True)
    program, *arguments = line.split()
    subprocess.run([str(Path(sys.executable).with_name(program)), *arguments], cwd=ROOT, check=True)


def report(bad_rows: set[int]) -> bool:
    """Print and check what the runlogs show. Return whether all is as expected."""
    from zerobook.runlog.history import History

    logs = {name: History.read(OUTPUT / name) for name in ("mended", "harmed", "clean")}
    mended, harmed, clean = (log.of("eval")[-1]["loss"] for log in logs.values())
    trained_rows = set()
    for step in logs["mended"].steps(current=True):
        trained_rows.update(step["ids"])
    trained_bad_rows = len(bad_rows & trained_rows)
    actions = [event["action"] for event in logs["mended"].of("decision")]
    checks = [
        ("skip" in actions, f"the run went back by itself: {', '.join(actions)}"),
        (trained_bad_rows == 0, f"of the {len(bad_rows)} spoilt rows, {trained_bad_rows} are in the run that was kept"),
        (mended < 1.01 * clean, f"held-out loss {mended:.3f}; {clean:.3f} had the rows never been there"),
        (harmed > 1.05 * clean, f"without the monitor it would have been {harmed:.3f}"),
        (not logs["clean"].of("decision"), "nothing had to be done about the run on sound data"),
    ]
    print()
    for is_true, sentence in checks:
        print(f"  {'yes' if is_true else 'NO '}  {sentence}")
    return all(is_true for is_true, _ in checks)


if __name__ == "__main__":
    sys.exit(main())

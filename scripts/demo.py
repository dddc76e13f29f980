"""The tutorial as one command: a real model, real dialogues, real ZeRO on two CPU processes.

SmolLM2-135M-Instruct gets LoRA adapters under ZeRO-2, is killed in the middle, and resumes under ZeRO-3. Then the order of
the samples is compared with that of a run that was never stopped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

# Without this variable, DeepSpeed warns on a CPU.
os.environ["DS_ACCELERATOR"] = "cpu"
# The demo runs on the CPU also on a machine with GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = Path("outputs") / "demo"
QUESTIONS = ["What language are you written in?", "What is the best season of the year?"]
STEPS = 12
SAVE_EVERY = 4
KILL_AT = 9
COMMAND = (
    "accelerate launch --config_file accelerate_configs/{strategy}.yaml --num_processes 2 --main_process_port 0 "
    "recipes/lora_finetune.py --model_name_or_path embedded:smollm2 --dataset_name embedded:chatterbot "
    "--max_seq_length 128 --per_device_train_batch_size 4 --per_device_eval_batch_size 16 --max_eval_samples 48 "
    "--learning_rate 1e-3 --num_warmup_steps 2 --lr_scheduler_type cosine --max_train_steps {steps} "
    "--save_steps {save} --logging_steps 1 --eval_on_start --output_dir {output} --resume_from_checkpoint auto"
)


def main() -> int:
    start = time.monotonic()
    shutil.rmtree(ROOT / OUTPUT, ignore_errors=True)
    title("1. Two answers of the model as it is")
    before = answers(adapter=None)

    title(f"2. LoRA under ZeRO-2, two processes; killed (SIGKILL) at step {KILL_AT}")
    killed_at = run("zero2", kill_at=KILL_AT)
    print(f"\nkilled at step {killed_at}; complete checkpoints: {', '.join(c.name for c in checkpoints())}")

    title("3. The same command with another strategy file: it goes on under ZeRO-3")
    run("zero3")

    title("4. The same two questions")
    after = answers(adapter=ROOT / OUTPUT / "adapter")
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        print(f"\n  {question}\n    before: {old}\n    after:  {new}")

    title("5. What happened")
    is_as_expected = report()
    print(f"\n{time.monotonic() - start:.0f} s in all")
    return 0 if is_as_expected else 1


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n=== {text}", flush=True)


def answers(adapter: Path | None) -> list[str]:
    """Return greedy answers to `QUESTIONS`, of the base model or with the adapter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zerobook.data import embedded
    from zerobook.utils.library_messages import hush_loading

    hush_loading()
    folder = embedded.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    texts = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        # The output begins with the question.
        question_tokens = inputs["input_ids"].shape[1]
        text = tokenizer.decode(output[0, question_tokens:], skip_special_tokens=True)
        texts.append(" ".join(text.split()))
        if adapter is None:
            print(f"  {question}\n    {texts[-1]}", flush=True)
    return texts


def run(strategy: str, kill_at: int | None = None) -> int:
    """Launch the recipe, and kill launcher and workers when ``kill_at`` steps are logged. Return the last logged step."""
    line = COMMAND.format(strategy=strategy, steps=STEPS, save=SAVE_EVERY, output=OUTPUT)
    print(f"$ {line}\n", flush=True)
    program, *arguments = line.split()
    process = subprocess.Popen([str(Path(sys.executable).with_name(program)), *arguments], cwd=ROOT)
    while process.poll() is None:
        time.sleep(0.2)
        if kill_at is not None and last_step() >= kill_at:
            family = [*psutil.Process(process.pid).children(recursive=True), process]
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
            return last_step()
    if process.returncode != 0 or kill_at is not None:
        raise SystemExit(f"the launch ended with {process.returncode} at step {last_step()}")
    return last_step()


def last_step() -> int:
    """Return the last step in the runlog, 0 if there is none."""
    steps = read("steps.jsonl")
    return steps[-1]["step"] if steps else 0


def read(name: str) -> list[dict]:
    """Return the lines of a file of the runlog."""
    from zerobook.runlog.jsonl import stream

    return list(stream(ROOT / OUTPUT / "runlog" / name))


def checkpoints() -> list[Path]:
    from zerobook.checkpoint import store

    return store.list_complete(store.folder_of(ROOT / OUTPUT))


def report() -> bool:
    """Print figures from the runlog and from the live engines. Return whether all are as expected."""
    events = read("events.jsonl")
    starts = [event for event in events if event["type"] == "run_start"]
    resumes = [event for event in events if event["type"] == "resume"]
    losses = [event["loss"] for event in events if event["type"] == "eval"]
    fall = 1 - losses[-1] / losses[0]
    for start in starts:
        live = start["live"]
        print(
            f"  attempt {start['attempt']}: live engine says ZeRO stage {live['zero_stage']} on {live['world_size']} processes"
        )
    has_same_order = report_order(starts[0], resumes[0]["step"])
    print(f"  held-out loss on the assistant's tokens: {losses[0]:.3f} -> {losses[-1]:.3f} ({fall:.0%} lower)")
    newest = checkpoints()[-1]
    print(f"  adapter:    {OUTPUT / 'adapter'}")
    print(f"  checkpoint: {newest.relative_to(ROOT)}")
    print(f"  runlog:     {OUTPUT / 'runlog'}")
    stages = [start["live"]["zero_stage"] for start in starts]
    return has_same_order and fall >= 0.25 and stages == [2, 3]


def report_order(first_start: dict, resume_step: int) -> bool:
    """Print and return whether the samples of both attempts came in the order of a run that was never stopped."""
    from zerobook.data.sampler import SampleOrder

    ids = []
    for step in read("steps.jsonl"):
        # The second attempt repeats the steps of the first one after the checkpoint.
        if step["attempt"] == 2 or step["step"] <= resume_step:
            ids += step["ids"]
    order = SampleOrder([first_start["data"]["train"]], seed=first_start["config"]["seed"])
    is_same = ids == order.ids(0, len(ids)).tolist()
    article = "the" if is_same else "NOT the"
    print(f"  resumed at step {resume_step}; {len(ids)} samples came in {article} order of a run that was never stopped")
    return is_same


if __name__ == "__main__":
    sys.exit(main())

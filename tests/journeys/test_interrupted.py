"""A journey: a run is interrupted, killed and fails, in a folder outside the clone. What a person sees, and what is saved."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from itertools import product

import psutil
import pytest

from tests.distributed.test_parity import largest_difference
from tests.harness import ROOT, SETTINGS, Run, command, launch, sampled
from zerobook.cli.main import main

USERS_RECIPE = """
from recipes.causal_lm import CausalLM
from zerobook.training.run import run


class Mine(CausalLM):
    def collator(self, tokenizer, model):
        return self.not_there


run(Mine)
"""
SLOW = """
import time
from zerobook.training.hooks import Hook


class Slow(Hook):
    def before_step(self, trainer, step):
        time.sleep(60 if step > 8 else 0)
"""
ENVIRONMENT = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}


def flags(tiny, **more):
    return dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=400, per_device_train_batch_size=2, logging_steps=1, save_steps=1000, lr_scheduler_type="constant",
    ) | more  # fmt: skip


def line_of(strategy, recipe, given, who="zerobook"):
    """Return the command line of a launch on two processes, with ``accelerate launch`` or ``zerobook launch``."""
    line = command(strategy, 2, recipe, given)
    place = line.index("accelerate.commands.launch")
    return line if who == "accelerate" else [*line[:place], "zerobook.cli.main", "launch", *line[place + 1 :]]


class Terminal:
    """A command in a process group of its own, which gets Ctrl-C as a terminal sends it."""

    def __init__(self, line, folder, output):
        self.log = folder / "terminal.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(line, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        self.steps = output / "runlog" / "steps.jsonl"
        self.until(lambda: self.steps.exists() and len(self.steps.read_text().splitlines()) >= 8)

    def until(self, done):
        end = time.monotonic() + 120
        while not done():
            assert self.process.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.05)

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def said(self):
        return self.log.read_text(errors="replace")


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.full)])
def test_ctrl_c_saves_and_says_how_to_go_on(tiny, tmp_path, capsys, strategy):
    output = tmp_path / "run"
    terminal = Terminal(line_of(strategy, "causal_lm", flags(tiny, output_dir=output)), tmp_path, output)
    terminal.interrupt()
    assert terminal.process.wait(120) == 130, terminal.said
    run, said = Run(output).read(), terminal.said
    told = run.event("preempted")
    assert told["signal"] == "SIGINT" and told["saved"] and run.event("checkpoint")["step"] == told["step"]
    assert "Traceback" not in said and said.count("Ctrl-C:") == 2, said
    line = shlex.split(said.rstrip().splitlines()[-1])
    assert line[:2] == ["zerobook", "launch"] and line[-2:] == ["--resume_from_checkpoint", "auto"], said
    assert main(["runlog", "status", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"Interrupted: step {told['step']} of 400")
    # the printed command goes on, here to a nearer end; the losses are those of a run that nobody interrupted
    last = told["step"] + 3
    words = [sys.executable, "-m", "zerobook.cli.main", *line[1:], "--max_train_steps", str(last)]
    again = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    flags_alone = flags(tiny, per_device_train_batch_size=4, max_train_steps=last)
    whole = launch("single", 1, "causal_lm", tmp_path / "whole", **flags_alone)
    assert [step["step"] for step in run.read().steps] == list(range(1, last + 1))
    assert largest_difference(run.losses, whole.losses) < 1e-4


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("who", ["zerobook", "accelerate"])
def test_a_second_ctrl_c_stops_now(tiny, tmp_path, who):
    (tmp_path / "slow.py").write_text(SLOW)
    output = tmp_path / "run"
    given = flags(tiny, output_dir=output, hooks=f"{tmp_path / 'slow.py'}:Slow")
    terminal = Terminal(line_of("ddp", "causal_lm", given, who), tmp_path, output)
    ranks = psutil.Process(terminal.process.pid).children()
    terminal.interrupt()
    terminal.until(lambda: "Press Ctrl-C again" in terminal.said)
    terminal.interrupt()
    assert terminal.process.wait(120) == (130 if who == "zerobook" else 1), terminal.said
    gone, alive = psutil.wait_procs(ranks, timeout=20)  # each would sleep for 60 s
    assert gone and not alive
    assert not list(output.glob("checkpoints/step-*")), terminal.said
    assert who == "accelerate" or "Traceback" not in terminal.said


ERRORS = {
    "of data": ("bad.jsonl", "DataError: ", 2),
    "in a recipe": ("mine.py", "'Mine' object has no attribute 'not_there'", 1),
}
"""Name -> (file that is wrong, what is said, exit status)."""


@pytest.mark.launch
@pytest.mark.parametrize("who, name", sampled(product(["accelerate", "zerobook"], ERRORS), ("zerobook", "in a recipe")))
def test_an_error_is_the_last_thing_that_a_launcher_says(tiny, tmp_path, who, name):
    (tmp_path / "mine.py").write_text(USERS_RECIPE)
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    file, says, code = ERRORS[name]
    recipe, data = (str(tmp_path / file), {}) if name == "in a recipe" else ("causal_lm", {"train_file": tmp_path / file})
    line = line_of("ddp", recipe, flags(tiny, output_dir=tmp_path / "run") | data, who)

    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)

    said = done.stdout + done.stderr
    if who == "zerobook":
        assert done.returncode == code, said
        assert says in "\n".join(said.rstrip().splitlines()[-6:]), said
        assert ("Traceback" in said) == (code == 1), said
        assert "OMP_NUM_THREADS" not in said and "exitcode" not in said, "the launcher adds nothing"
    else:
        assert says in said[said.rindex("Root Cause") :], said


@pytest.mark.launch
def test_a_rank_that_is_killed_is_named_with_its_signal(tiny, tmp_path):
    output = tmp_path / "run"
    terminal = Terminal(line_of("ddp", "causal_lm", flags(tiny, output_dir=output)), tmp_path, output)
    victim = next(rank for rank in psutil.Process(terminal.process.pid).children() if rank.environ().get("RANK") == "1")
    victim.kill()
    assert terminal.process.wait(120) == 128 + signal.SIGKILL, terminal.said
    assert f"rank 1, process {victim.pid}, was ended by SIGKILL" in terminal.said

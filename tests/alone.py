"""Train a recipe inside the test process, for tests that need a whole run of one process."""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState

from tests.harness import Run
from zerobook.runlog.writer import RunLog


def train(output: Path, recipe: Any = None, *, page: bool = False, **flags: Any) -> Run:
    """Train ``recipe`` (`CausalLM` where it is None) with ``flags`` and return the finished run.

    Args:
        page: draw the figures of the report, which take as long as the training of a tiny model.
    """
    from recipes.causal_lm import CausalLM
    from zerobook.config_sources import parse
    from zerobook.launch.build import resolve_this_process
    from zerobook.runlog import report
    from zerobook.training import run, trainer

    gc.collect()  # the locks on a folder are released with the trainer that held them
    line = ["recipe.py", "--output_dir", str(output)]
    for key, value in flags.items():
        line += [f"--{key}", *([] if value is True else [str(value)])]
    AcceleratorState._reset_state(reset_partial_state=True)
    logs = []

    def opened(*args):
        logs.append(RunLog(*args))
        return logs[-1]

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with (mock.patch.object(sys, "argv", line), mock.patch.dict("os.environ"),
              mock.patch.object(trainer, "RunLog", opened),
              nullcontext() if page else mock.patch.object(report, "render", lambda history: "")):  # fmt: skip
            recipe = recipe or CausalLM
            config, sources, _ = parse(recipe.config_class)
            plan, config, sources = resolve_this_process(config, sources)
            run.train(recipe(config), sources=sources, plan=plan)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for log in logs:
            log.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Run(output).read()

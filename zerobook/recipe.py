"""What every recipe's entry does before and after training: dry runs, errors, the final model."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerobook.config import RecipeConfig, Resolved
from zerobook.data.feed import Layout
from zerobook.errors import ZerobookError
from zerobook.files import modes_by_umask, put_in_place, staging_of
from zerobook.resolve import LaunchPlan
from zerobook.strategy import Strategy
from zerobook.terminal import console, say, say_traceback


def run_recipe(main: Callable[[], Any]) -> None:
    """Call ``main``; print a user's error without a traceback, once, and exit with 2."""
    sys.excepthook = say_traceback
    try:
        main()
    except ZerobookError as error:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if rank != 0:
            # Most errors are every rank's. The launcher stops all once one has exited, so the rank that prints goes
            # first; who is still alive after that met an error of its own.
            time.sleep(5)
        where = f" (rank {rank})" if rank else ""
        say(f"\n{type(error).__name__}{where}: {error}\n", file=sys.stderr)
        os._exit(2)  # without destructors, which would wait for other ranks
    leave()


def leave(code: int = 0) -> None:
    """End a launched process with ``code`` after all that was registered for its end.

    One process alone returns, or raises `SystemExit` where ``code`` is not 0.

    gloo's threads drop their last tensors some time after a collective has returned. Where that falls into the
    interpreter's own shutdown, the process aborts ("terminate called without an active exception") and the launcher
    reports a finished run as failed, so a launched process ends without that shutdown.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        if code:
            sys.exit(code)
        return
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def announce(plan: LaunchPlan) -> None:
    """The one line about the strategy, and what was decided on the way. Rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        say(plan.line)
        for note in plan.notes:
            say(f"  note: {note}")


def print_dry_run(config: RecipeConfig, sources: Resolved, plan: LaunchPlan) -> None:
    """The resolved config, where each value came from, the batch arithmetic and the strategy. Rank 0 only."""
    if int(os.environ.get("RANK", 0)) != 0:
        return
    from rich.table import Table

    out = console()
    table = Table(title="resolved config", title_justify="left")
    for column in ("key", "value", "from"):
        table.add_column(column, overflow="fold")
    values = config.model_dump()
    for key in sorted(values, key=lambda k: not sources.given(k)):
        style = "" if sources.given(key) else "dim"
        table.add_row(key, str(values[key]), sources[key], style=style)
    out.print(table)
    layout = Layout(
        world_size=plan.world_size,
        rank=0,
        micro=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
    )
    out.print(plan.line)
    for note in plan.notes:
        out.print(f"  note: {note}")
    out.print(f"batch: {layout.arithmetic}")
    steps = f"{config.max_train_steps}" if config.max_train_steps else (
        f"ceil({config.num_train_epochs} x training samples / {layout.global_batch}), known once the data is read")  # fmt: skip
    out.print(f"steps: {steps}")


def save_model(strategy: Strategy, tokenizer: Any, config: RecipeConfig, name: str = "model") -> Path:
    """Write the trained model (or adapter) as a plain folder that ``from_pretrained`` takes. Collective.

    Weights are gathered whole, one at a time, to rank 0, from their fp32 masters. A whole model is written in
    ``config.dtype``, whatever precision it was trained in; an adapter in fp32. Weights that transformers loads in fp32
    whatever the dtype stay in fp32, and buffers keep the dtypes they were loaded in. The folder appears whole: until then, the
    result of an earlier attempt keeps its place.
    """
    from transformers import PreTrainedModel

    from zerobook.evaluation.generation import save_generation_config
    from zerobook.modeling import DTYPES

    model = strategy.unwrapped
    whole = isinstance(model, PreTrainedModel)
    dtype = torch.float32 if not whole else model.config.dtype if config.dtype == "auto" else DTYPES[config.dtype]
    folder = Path(config.output_dir) / name
    weights: dict[str, Any] = {}
    for key, parameter in strategy.trainable():
        tensor = strategy.get_tensor(parameter)
        if strategy.is_main:
            kept = torch.float32 if strategy.loaded_dtypes.get(key) == torch.float32 else dtype
            weights[key] = tensor.to("cpu", kept, copy=True)
        del tensor
    if strategy.is_main:
        weights |= strategy.buffers()
        staging = staging_of(folder)
        model.save_pretrained(staging, state_dict=weights)
        if whole:
            # save_pretrained writes down the live model: the strategy's compute dtype, the cache that training switches off
            file = staging / "config.json"
            facts = json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
            file.write_text(json.dumps(facts, indent=2) + "\n")
        save_generation_config(model, tokenizer, staging)
        tokenizer.save_pretrained(staging)
        modes_by_umask(staging)
        put_in_place(staging, folder)
        say(f"saved {folder} ({str(dtype).removeprefix('torch.')})")
    strategy.barrier()
    return folder

"""Train with faults, with and without the monitor, and compare the final held-out losses.

    python scripts/recovery_table.py [--steps 60 150 500] [--seeds 3] [--write docs/measured/recovery.md]

Each run is `causal_lm` on the embedded dialogues with a very small GPT-2 with random weights, under DDP with two processes and
the flags in `train`; only the seed, the number of steps, the fault and `on_spike` differ. A fault begins after a sixth, a half
or four fifths of the steps, and lasts six steps: all labels of one rank's rows are the same token, or are shuffled, or the
learning rate is 60 times too high. The losses are divided by those of the run of the same seed that has no fault and no
monitor. About 15 seconds a run on two cores.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is not part of the installed package

from tests.harness import ROOT, Run, launch
from tests.tiny import folder as tiny_models
from zerobook.utils.terminal import say

FAULT_STEPS = 6
PLACES = {"early": 1 / 6, "middle": 1 / 2, "late": 4 / 5}
FAULTS = {"labels": "bad data", "shuffled": "shuffled labels", "rate": "rate too high"}


class Case(NamedTuple):
    """A run: its number of steps, its fault and the step at which it begins; None for a run without a fault."""

    steps: int
    fault: str | None
    place: str | None


class Outcome(NamedTuple):
    """Final held-out loss, actions in their order, and number of abandoned steps."""

    loss: float
    actions: tuple[str, ...]
    abandoned_steps: int


def train(case: Case, seed: int, on_spike: str, folder: Path) -> Outcome:
    environment: dict[str, object] = {}
    through = None
    if case.fault is not None and case.place is not None:
        begin = round(case.steps * PLACES[case.place])
        environment = {"ZEROBOOK_FAULT": case.fault, "ZEROBOOK_FAULT_AT": begin, "ZEROBOOK_FAULT_STEPS": FAULT_STEPS}
        through = ROOT / "tests" / "distributed" / "faults.py"
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    run = launch(
        "ddp",
        2,
        "causal_lm",
        output,
        through=through,
        environment=environment,
        expect=None,
        model_name_or_path=tiny_models() / "gpt2",
        dataset_name="embedded:chatterbot",
        cache_dir=folder / "data",
        block_size=64,
        max_train_steps=case.steps,
        per_device_train_batch_size=4,
        learning_rate=6e-3,
        max_eval_samples=100,
        seed=seed,
        on_spike=on_spike,
    )
    return outcome_of(run)


def outcome_of(run: Run) -> Outcome:
    """Return the last held-out loss, the actions and the abandoned steps of a run, from its events."""
    loss = math.nan
    actions = []
    abandoned_steps = 0
    for event in run.events:
        if event["type"] == "eval":
            loss = event["loss"]
        elif event["type"] == "decision" and event["action"] != "none":
            actions.append(event["action"])
        # A rollback has two events, before and after it.
        elif event["type"] == "rollback" and event["phase"] == "intent":
            abandoned_steps += event["from_step"] - event["to_step"]
    # A run that stopped, so that a person decides, has no final evaluation.
    if run.returncode != 0:
        loss = math.nan
    return Outcome(loss, tuple(actions), abandoned_steps)


def row(case: Case, outcomes: list[tuple[Outcome, Outcome]], clean: list[float]) -> str:
    """Return the line of a case.

    Args:
        outcomes: without and with the monitor, for each seed.
        clean: losses of the runs of the same seeds without a fault and a monitor.
    """
    without_monitor = [without for without, _ in outcomes]
    with_monitor = [outcome for _, outcome in outcomes]
    actions = "; ".join(", ".join(outcome.actions) or "none" for outcome in with_monitor)
    abandoned_steps = ", ".join(str(outcome.abandoned_steps) for outcome in with_monitor)
    fault = "none" if case.fault is None else f"{FAULTS[case.fault]}, {case.place}"
    cells = [str(case.steps), fault, loss_ratios(without_monitor, clean), loss_ratios(with_monitor, clean)]
    return f"| {' | '.join([*cells, actions, abandoned_steps])} |"


def loss_ratios(outcomes: list[Outcome], clean: list[float]) -> str:
    """Return the median, the smallest and the largest ratio of a loss to the loss of the clean run of its seed."""
    ratios = [outcome.loss / loss for outcome, loss in zip(outcomes, clean, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 150, 500])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="put the table between its marks in this Markdown file")
    flags = parser.parse_args()
    cases = []
    for steps in flags.steps:
        cases.append(Case(steps, None, None))
        for fault in FAULTS:
            cases += [Case(steps, fault, place) for place in PLACES]
    lines = [
        "| steps | fault | held-out loss without the monitor | with it | actions of each seed | abandoned steps |",
        "|---|---|---|---|---|---|",
    ]
    clean: list[float] = []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(cases) * flags.seeds * 2, unit="run") as bar:
        for case in cases:
            outcomes = []
            for seed in range(flags.seeds):
                pair = []
                for on_spike in ("log", "rollback"):
                    pair.append(train(case, seed, on_spike, Path(folder)))
                    bar.update()
                outcomes.append((pair[0], pair[1]))
            if case.fault is None:
                clean = [without.loss for without, _ in outcomes]
            lines.append(row(case, outcomes, clean))
            tqdm.write(lines[-1])
    table = "\n".join(lines)
    machine = f"{platform.machine()} CPU, torch {torch.__version__}, {date.today()}"
    text = f"Median of {flags.seeds} seeds (smallest to largest). {machine}.\n\n{table}\n"
    say(text)
    if flags.write is not None:
        before, rest = flags.write.read_text().split("<!-- table -->\n")
        after = rest.split("<!-- end of table -->")[1]
        flags.write.write_text(f"{before}<!-- table -->\n{text}<!-- end of table -->{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

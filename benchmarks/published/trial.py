"""Runs in fresh processes under a budget, and a search for the largest batch that fits."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.published.capped import is_refusal
from zerobook.errors import ZerobookError
from zerobook.runlog.jsonl import stream
from zerobook.runlog.writer import STEPS
from zerobook.utils import subprocess_launch

ROOT = Path(__file__).resolve().parents[2]
CAPPED = Path(__file__).with_name("capped.py")
LIMIT_S = 480.0
"""Default limit in seconds for a run."""
# Blocks of 64 KiB and more are returned to the kernel when they are freed, and threads have no own heaps: a process then
# holds only what its tensors hold.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class TrialError(ZerobookError):
    """Error for a run that failed for another reason than its budget. ``output`` is what the run printed."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Arm:
    """A strategy as it is launched: ``launcher`` are flags of ``accelerate launch``."""

    name: str
    launcher: tuple[str, ...]
    ranks: int

    @classmethod
    def of(cls, file: str, ranks: int, name: str | None = None) -> Arm:
        """Return the arm of a file of accelerate_configs/."""
        return cls(name or file, ("--config_file", str(ROOT / "accelerate_configs" / f"{file}.yaml")), ranks)


@dataclass
class Outcome:
    """Result of a run."""

    # the error of the allocation that exceeded the budget; "" if none did
    refused: str = ""
    # seconds of each step, and of the evaluation, on the slowest rank
    steps: list[float] = field(default_factory=list)
    evaluation: float = 0.0
    # kind of state -> bytes between the backward pass and the update, on the fullest rank
    held: dict[str, int] = field(default_factory=dict)
    # most bytes on a GPU
    peak: int | None = None
    # loss of each step
    losses: list[float] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return not self.refused

    @property
    def training(self) -> float:
        return sum(self.steps)

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first."""
        return statistics.median(self.steps[1:] or self.steps)


def attempt(arm: Arm, recipe: str, flags: dict[str, object], budget: int, limit: float = LIMIT_S) -> Outcome:
    """Run the recipe to its end under ``budget`` bytes a process (0: no budget), in ``limit`` seconds including its start.

    Raises:
        TrialError: the run failed, and not because of its budget.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        file = ROOT / "recipes" / f"{recipe}.py"
        # Nothing is saved, so a full disk is not a problem.
        words = subprocess_launch.flags(flags | {"output_dir": Path(folder) / "run", "on_low_disk": "warn"})
        line = subprocess_launch.command(arm.launcher, arm.ranks, CAPPED, result, budget, file, *words)
        environment: dict[str, str] = {}
        # On a GPU the budget counts device memory, and compilers and CUDA's threads need the ordinary stack.
        if budget and not subprocess_launch.runs_on_gpu(os.environ):
            # A thread's stack counts as well, 8 MiB by default.
            line = ["prlimit", "--stack=1048576", *line]
            environment = ALLOCATOR
        code, text = subprocess_launch.run(line, limit, environment, cwd=ROOT)
        paths = [result.with_suffix(f".{rank}.json") for rank in range(arm.ranks)]
        ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
        losses = [step["loss"] for step in stream(Path(folder) / "run" / "runlog" / STEPS)]
    refused = next((rank["refused"] for rank in ranks if "refused" in rank), "")
    if not refused and code and is_refusal(text):
        refused = next(line.strip()[:300] for line in text.splitlines() if is_refusal(line))
    if refused and budget:
        return Outcome(refused)
    if code or len(ranks) < arm.ranks:
        if code == subprocess_launch.TIMED_OUT:
            why = f"it was stopped after {limit:.0f} s"
        else:
            why = f"exit status {code}: {subprocess_launch.last_error(text)}"
        raise TrialError(f"{arm.name}, {recipe}: {why}. The line was: {' '.join(line)}", text)
    # for each rank, the seconds between the ends of its steps
    seconds_by_rank = []
    for rank in ranks:
        seconds_by_rank.append([after - before for before, after in pairwise(rank["times"])])
    fullest_rank = max(ranks, key=lambda rank: sum(rank["held"].values()))
    return Outcome(
        steps=[max(seconds) for seconds in zip(*seconds_by_rank, strict=True)],
        evaluation=max(rank.get("evaluation", 0.0) for rank in ranks),
        held=fullest_rank["held"],
        peak=max((rank["peak"] for rank in ranks if "peak" in rank), default=None),
        losses=losses,
        result=ranks[0].get("result", {}),
    )


@dataclass
class Search:
    """Result of a search. ``largest`` is the largest number that fits, 0 if not even 1 does. ``refused`` is the smallest
    that did not fit, None if there was none, and ``why`` its reason. ``tried`` has all numbers in order."""

    largest: int = 0
    refused: int | None = None
    why: str = ""
    tried: list[int] = field(default_factory=list)


def largest(run: Callable[[int], Outcome], *, start: int, most: int) -> Search:
    """Find the largest number that fits by bisection, to within an eighth of it or 2. Each try has fresh processes.

    Args:
        run: runs one try; where a number does not fit, no larger number fits.
        start: the first number; doubled while it fits, halved while it does not.
        most: the largest number to try.
    """
    found = Search()

    def fits(number: int) -> bool:
        found.tried.append(number)
        outcome = run(number)
        if outcome.fits:
            found.largest = number
        else:
            found.refused, found.why = number, outcome.refused
        return outcome.fits

    number = start
    if fits(number):
        while found.refused is None and found.largest < most:
            fits(min(2 * found.largest, most))
    else:
        while not found.largest and (found.refused or 0) > 1:
            fits((found.refused or 0) // 2)
    while found.refused is not None and found.largest and found.refused - found.largest > max(2, found.largest // 8):
        fits((found.largest + found.refused) // 2)
    return found


def fingerprint(arm: Arm, recipe: str, flags: dict[str, object]) -> str:
    """Return a hash of everything that decides a run: the launcher's files by their contents, recipe and flags, folders by
    their names."""
    state = hashlib.sha256()
    for word in (*arm.launcher, recipe, *sorted(f"{key}={_bare(value)}" for key, value in flags.items())):
        path = Path(word)
        content = path.read_text() if path.is_absolute() and path.is_file() else word
        for name in _deepspeed_files(content):
            content = content.replace(name, (ROOT / name).read_text())  # wherever the file is
        state.update(content.encode())
    return state.hexdigest()[:12]


def _bare(value: object) -> object:
    return value.name if isinstance(value, Path) else value


def _deepspeed_files(text: str) -> Sequence[str]:
    return [line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith("deepspeed_config_file:")]

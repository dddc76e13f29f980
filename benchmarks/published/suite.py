"""Runner of all tables, one after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.published import accumulation, dialogue, one_device, precision, recompute, states
from benchmarks.published.bench import Bench
from benchmarks.published.table import Table
from benchmarks.published.trial import TrialError

TABLES: dict[str, Callable[[Bench], Table | list[Table]]] = {
    "A": dialogue.run,
    "B": one_device.run,
    "CD": states.run,
    "E": precision.run,
    "F": recompute.run,
    "G": accumulation.run,
}


def run(bench: Bench, letters: str) -> list[Table]:
    """Return the tables of ``letters``. Where a run fails, its table says so, and the other tables still run."""
    found: list[Table] = []
    for keys, make in TABLES.items():
        if not set(keys) & set(letters):
            continue
        try:
            made = make(bench)
        except TrialError as error:
            made = [Table(key, "no result", "-", died=str(error)) for key in keys]
        found += [table for table in (made if isinstance(made, list) else [made]) if table.letter in letters]
    return found


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current run: in a bar that counts runs, or in lines where the output is not a
    terminal."""
    from zerobook.utils.bars import tqdm

    start, watched = time.monotonic(), sys.stderr.isatty()
    with tqdm(unit=" runs", desc="reproducing", disable=not watched) as bar:

        def say(words: str) -> None:
            bar.set_postfix_str(words)
            bar.update()
            if not watched:
                print(f"{time.monotonic() - start:5.0f} s  {words}", flush=True)

        yield say

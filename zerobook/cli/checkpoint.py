"""``zerobook checkpoint``: what a run has saved, whether it is whole, and what is kept.

zerobook checkpoint list outputs/run
zerobook checkpoint verify outputs/run
zerobook checkpoint inspect outputs/run/checkpoints/step-000200
zerobook checkpoint pin outputs/run/checkpoints/step-000200
zerobook checkpoint prune outputs/run --keep 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.checkpoint import store
from zerobook.checkpoint.save import ADAM_STEPS, STATE_SHAPES, STEPS
from zerobook.cli.arguments import Parser
from zerobook.errors import CheckpointError
from zerobook.utils.terminal import console, plain, say
from zerobook.utils.units import counted, size

if TYPE_CHECKING:
    from rich.table import Table


def checkpoint(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code, 1 where `verify` found damage."""
    parser = Parser("zerobook checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "verify", "inspect", "pin", "unpin", "prune"])
    parser.add_argument("path", help="a run's output_dir, or one checkpoint's folder")
    parser.add_argument(
        "--keep", type=int, help="prune: number of the newest checkpoints that are kept, besides pinned ones and the best"
    )
    parser.add_argument("--json", action="store_true", help="list, verify, inspect: print JSON")
    known = parser.parse_args(arguments)
    path = Path(os.path.abspath(Path(known.path).expanduser()))  # ``.`` has no name to find the pin by
    if known.json and known.action not in ("list", "verify", "inspect"):
        raise CheckpointError(f"zerobook checkpoint {known.action}: it prints no JSON. list, verify and inspect do.")
    if known.action == "list":
        _list(_run(path), as_json=known.json)
        return 0
    if known.action == "verify":
        return _verify(_one_or_all(path), as_json=known.json)
    if known.action == "prune":
        if known.keep is None or known.keep < 1:
            raise CheckpointError(f"prune: --keep is {known.keep}. Say how many of the newest checkpoints stay, at least 1.")
        checkpoints = _run(path)
        with store.owned(checkpoints, wait=0):
            gone = store.prune(checkpoints, known.keep)
        say("\n".join(f"deleted {c}" for c in gone) or "nothing to delete")
        return 0
    if not (path / store.MANIFEST).exists():
        raise CheckpointError(f"{path}: this is not a checkpoint. A run's checkpoints are in OUTPUT_DIR/checkpoints.")
    if known.action == "inspect" and known.json:
        print(json.dumps(_facts(path), indent=2))
    elif known.action == "inspect":
        _inspect(path)
    else:
        _pin(path, known.action == "pin")
        say(f"{path} is {'kept whatever is pruned' if known.action == 'pin' else 'pruned like any other'}")
    return 0


def _pin(one: Path, wanted: bool) -> None:
    """Pin a checkpoint, or unpin it. A run may train meanwhile: pruning looks for the pin just before it deletes."""
    store.pin(one, wanted)
    if not (one / store.MANIFEST).exists():
        store.pin(one, False)
        raise CheckpointError(f"{one}: the run has just deleted it or set it aside. `list` shows the checkpoints that remain.")


def _run(path: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    for folder in (store.folder_of(path), path):
        if store.candidates(folder) or store.list_unreadable(folder):
            return folder
    raise CheckpointError(f"{path}: there are no checkpoints. Give a run's output_dir.")


def _one_or_all(path: Path) -> list[Path]:
    if (path / store.MANIFEST).exists() or store.step_of(path) >= 0:
        return [path]
    checkpoints = _run(path)
    return [*store.candidates(checkpoints), *store.list_aside(checkpoints, "unreadable")]


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        right = column in ("step", "samples", "held-out loss", "size", "numbers", "tensors", "pieces")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _list(checkpoints: Path, *, as_json: bool) -> None:
    from rich.text import Text

    if as_json:
        print(json.dumps([_facts(one, store.best(checkpoints)) for one in store.candidates(checkpoints)], indent=2))
        return
    table = _table(str(checkpoints), "step", "samples", "held-out loss", "size", "written", "by", "")
    favourite = store.best(checkpoints)
    bad = store.list_unreadable(checkpoints)
    for one in sorted({*store.candidates(checkpoints), *store.list_aside(checkpoints, "abandoned"), *bad}):
        reason = bad.get(one) or store.damage(one)
        if reason is not None:
            table.add_row(_step(one), "", "", "", "", "", Text.assemble(("damaged", "red"), f": {plain(reason)}"))
            continue
        progress, index = store.read_json(one / store.PROGRESS), store.read_json(one / "tensors.json")
        loss = store.eval_loss(one)
        by = index["written_by"]
        marks = [word for word, true in (("best", one == favourite), ("pinned", store.is_pinned(one))) if true]
        written = datetime.fromtimestamp((one / store.MANIFEST).stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            _step(one), f"{progress['samples']:,}", "" if loss is None else f"{loss:.4f}",
            size(store.bytes_of(one)), written, f"{by['strategy']}, {counted(by['world_size'], 'process')}", ", ".join(marks),
        )  # fmt: skip
    console().print(table)


def _facts(one: Path, best: Path | None = None) -> dict[str, Any]:
    """Return a checkpoint as JSON values."""
    reason = store.damage(one)
    if reason is not None:
        return {"folder": str(one), "damage": reason}
    index = store.read_json(one / "tensors.json")
    return {
        "folder": str(one), "damage": None, "best": one == best, "pinned": store.is_pinned(one),
        "bytes": store.bytes_of(one), "written_by": index["written_by"], "held_out_loss": store.eval_loss(one),
        "progress": store.read_json(one / store.PROGRESS),
    }  # fmt: skip


def _step(one: Path) -> str:
    """Return ``12``, or ``12 abandoned`` for ``step-000012.abandoned``."""
    step, _, kind = one.name.removeprefix("step-").partition(".")
    return f"{int(step)} {kind}".strip()


def _verify(checkpoints: list[Path], *, as_json: bool) -> int:
    """Read every byte, and print one line per checkpoint. Return 1 if one is damaged, else 0."""
    from zerobook.utils.bars import tqdm

    found = {}
    total = sum(f.stat().st_size for c in checkpoints if c.is_dir() for f in c.iterdir() if f.is_file())
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, leave=False) as bar:
        for one in checkpoints:
            found[one] = store.damage(one, thorough=True, tell=bar.update)
    if as_json:
        print(json.dumps([{"folder": str(one), "damage": reason} for one, reason in found.items()], indent=2))
        return int(any(found.values()))
    for one, reason in found.items():
        say(f"{one}: whole" if reason is None else f"damaged: {reason}")
    return int(any(found.values()))


def _inspect(one: Path) -> None:
    reason = store.damage(one)
    if reason is not None:
        raise CheckpointError(reason)
    progress, index = store.read_json(one / store.PROGRESS), store.read_json(one / "tensors.json")
    table = _table(str(one), "progress", "value")
    for key, value in progress.items():
        table.add_row(key, str(value))
    console().print(table)
    sizes = {name: math.prod(shape) for name, shape in index["shapes"].items()}
    of_state = {name: math.prod(shape) for name, shape in index.get(STATE_SHAPES, {}).items()}
    table = _table("tensors", "kind", "tensors", "numbers", "size", "pieces")
    for kind in sorted({name.partition("/")[0] for name in index["pieces"]}):
        names = [name for name in index["pieces"] if name.startswith(f"{kind}/")]
        pieces = [piece for name in names for piece in index["pieces"][name]]
        numbers = sum(of_state.get(name, sizes[name.partition("/")[2]]) for name in names)
        table.add_row(kind, str(len(names)), f"{numbers:,}", size(4 * numbers), str(len(pieces)))
    console().print(table)
    table = _table("largest weights", "name", "shape")
    for name in sorted(sizes, key=lambda name: -sizes[name])[:5]:
        table.add_row(name, " x ".join(map(str, index["shapes"][name])))
    console().print(table)
    optimizer = store.read_json(one / "config.json").get("config", {}).get("optimizer", "adamw")
    steps = index[STEPS] if STEPS in index else index[ADAM_STEPS]
    console().print(f"written by {index['written_by']}; the optimizer {optimizer} has taken {counted(steps, 'step')}")

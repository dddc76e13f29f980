"""``zerobook checkpoint``: list, verify, inspect, pin, prune, import and export checkpoints.

zerobook checkpoint list outputs/run
zerobook checkpoint verify outputs/run
zerobook checkpoint inspect outputs/run/checkpoints/step-000200
zerobook checkpoint pin outputs/run/checkpoints/step-000200
zerobook checkpoint prune outputs/run --keep 2
zerobook checkpoint import outputs/checkpoint-500 --output outputs/run
zerobook checkpoint export outputs/run/checkpoints/step-000600 --to trainer --output outputs/checkpoint-600
"""

import argparse
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from zerobook.checkpoint import store
from zerobook.cli.arguments import Parser
from zerobook.errors import CheckpointError, RunLogError
from zerobook.runlog.history import folder_of, is_written_elsewhere
from zerobook.utils.terminal import console, make_table, plain, say
from zerobook.utils.units import counted, size


def checkpoint(arguments: list[str]) -> int:
    """Run ``zerobook checkpoint ARGUMENTS``. Return the exit code: 1 where `verify` found damage, otherwise 0."""
    parser = Parser("zerobook checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "verify", "inspect", "pin", "unpin", "prune", "import", "export"])
    parser.add_argument(
        "path", help="a run's output_dir, or one checkpoint's folder; import: the checkpoint of another trainer"
    )
    parser.add_argument(
        "--keep", type=int, help="prune: number of the newest checkpoints that are kept, besides pinned ones and the best"
    )
    parser.add_argument("--output", type=Path, help="import: folder of the run that is made; export: folder of the checkpoint")
    parser.add_argument(
        "--to",
        choices=["trainer", "deepspeed", "dcp"],
        help="export: to transformers' Trainer, to DeepSpeed's universal checkpoint, or to a sharded state dict as of FSDP",
    )
    parser.add_argument("--json", action="store_true", help="list, verify, inspect: print JSON")
    flags = parser.parse_args(arguments)
    # A pin is a file beside the checkpoint with the checkpoint's name in its name, which a path such as ``.`` does not have.
    path = Path(os.path.abspath(Path(flags.path).expanduser()))
    if flags.json and flags.action not in ("list", "verify", "inspect"):
        raise CheckpointError(f"zerobook checkpoint {flags.action}: it prints no JSON. list, verify and inspect do.")
    if flags.action == "list":
        _list(_checkpoints_folder(path), as_json=flags.json)
        return 0
    if flags.action == "verify":
        return _verify(_checkpoints_at(path), as_json=flags.json)
    if flags.action == "prune":
        _prune(path, flags.keep)
        return 0
    if flags.action == "import":
        _import(path, flags.output)
        return 0
    # The other actions are for a single checkpoint.
    if not (path / store.MANIFEST).exists():
        raise CheckpointError(f"{path}: this is not a checkpoint. A run's checkpoints are in OUTPUT_DIR/checkpoints.")
    if flags.action == "inspect" and flags.json:
        print(json.dumps(_describe_as_json(path, store.find_best(path.parent)), indent=2))
    elif flags.action == "inspect":
        _inspect(path)
    elif flags.action == "export":
        _export(path, flags.output, flags.to)
    elif flags.action == "pin":
        _set_pin(path, True)
        say(f"{path} is pinned: it is never pruned")
    else:
        _set_pin(path, False)
        say(f"{path} is no longer pinned: it can be pruned")
    return 0


def _import(path: Path, output: Path | None) -> None:
    from zerobook.interop.checkpoints.importer import flags_of, import_checkpoint

    if output is None:
        raise CheckpointError("import: give --output, the folder of the run that is made.")
    imported = import_checkpoint(path, output)
    source = imported.source
    flags = " ".join(f"--{name} {value}" for name, value in flags_of(source, imported.position).items())
    say(
        f"{imported.checkpoint}: step {imported.position.step} of {source.trainer}, {len(source.shapes)} weights\n"
        f"continue it under any strategy, with your model and data and\n"
        f"  --output_dir {output} --resume_from_checkpoint auto {flags}\n"
        "Warm-up, form of the schedule and clipping are not recorded in it: give those of the other run too, and "
        "--warmup_from_zero for a warm-up of transformers. "
        "The order of its samples cannot be taken over: the run goes on with as many passes done, in an order of its own."
    )
    if imported.decays_vectors:
        say("Its weight decay was for norm gains and biases too; here only matrices decay.")


def _export(checkpoint: Path, output: Path | None, form: str | None) -> None:
    from zerobook.interop.checkpoints.exporter import export_state

    if output is None or form is None:
        raise CheckpointError("export: give --output, the folder that is made, and --to, the trainer that continues it.")
    export_state(checkpoint, output, form)
    say(f"wrote {output}")
    if form == "deepspeed":
        say('DeepSpeed loads it with "checkpoint": {"load_universal": true} in its JSON.')


def _prune(path: Path, keep: int | None) -> None:
    if keep is None or keep < 1:
        raise CheckpointError(f"prune: --keep is {keep}. Say how many of the newest checkpoints stay, at least 1.")
    checkpoints = _checkpoints_folder(path)
    with suppress(RunLogError):
        if is_written_elsewhere(folder_of(checkpoints.parent)):
            raise CheckpointError(
                f"{checkpoints}: a run on another host has written its log within the last three minutes, and prunes its own "
                "checkpoints. Wait until it ends."
            )
    # A run that trains holds this lock, and prunes its own checkpoints. Do not wait for its end.
    with store.locked(checkpoints, wait=0):
        deleted = store.prune(checkpoints, keep)
    say("\n".join(f"deleted {checkpoint}" for checkpoint in deleted) or "nothing to delete")


def _set_pin(checkpoint: Path, pinned: bool) -> None:
    """Pin a checkpoint, or unpin it. The run may train meanwhile: it looks for the pin just before it deletes a checkpoint."""
    store.pin(checkpoint, pinned)
    # If the run was faster, remove the pin.
    if not (checkpoint / store.MANIFEST).exists():
        store.pin(checkpoint, False)
        raise CheckpointError(
            f"{checkpoint}: the run has just deleted it or set it aside. `list` shows the checkpoints that remain."
        )


def _checkpoints_folder(path: Path) -> Path:
    """Return the folder of a run's checkpoints: ``path`` itself, or the folder of checkpoints in the run's ``path``."""
    for folder in (store.folder_of(path), path):
        if store.list_candidates(folder) or store.list_unreadable(folder):
            return folder
    raise CheckpointError(f"{path}: there are no checkpoints. Give a run's output_dir.")


# Return ``path`` if it is a checkpoint; otherwise all checkpoints of the run, also those that were set aside as unreadable.
def _checkpoints_at(path: Path) -> list[Path]:
    # A damaged checkpoint may lack its manifest. Its name still has a step, and a run's folder has none (-1).
    if (path / store.MANIFEST).exists() or store.step_of(path) >= 0:
        return [path]
    folder = _checkpoints_folder(path)
    return [*store.list_candidates(folder), *store.list_aside(folder, "unreadable")]


def _list(folder: Path, *, as_json: bool) -> None:
    from rich.text import Text

    best = store.find_best(folder)
    if as_json:
        print(json.dumps([_describe_as_json(checkpoint, best) for checkpoint in store.list_candidates(folder)], indent=2))
        return
    figures = ("step", "samples", "held-out loss", "size")
    table = make_table(str(folder), (*figures, "written", "by", ""), numbers=figures)
    unreadable = store.list_unreadable(folder)
    for checkpoint in sorted({*store.list_candidates(folder), *store.list_aside(folder, "abandoned"), *unreadable}):
        reason = unreadable.get(checkpoint) or store.find_damage(checkpoint)
        if reason is None:
            table.add_row(*_table_row(checkpoint, is_best=checkpoint == best))
        else:
            mark = Text.assemble(("damaged", "red"), f": {plain(reason)}")
            table.add_row(_format_step(checkpoint), "", "", "", "", "", mark)
    console().print(table)


def _table_row(checkpoint: Path, *, is_best: bool) -> list[str]:
    """Return the cells of an undamaged checkpoint in the table of `_list`."""
    loss = store.eval_loss(checkpoint)
    written = datetime.fromtimestamp((checkpoint / store.MANIFEST).stat().st_mtime)
    written_by = store.read_json(checkpoint / "tensors.json")["written_by"]
    marks = ["best"] if is_best else []
    if store.is_pinned(checkpoint):
        marks.append("pinned")
    return [
        _format_step(checkpoint),
        f"{store.read_json(checkpoint / store.PROGRESS)['samples']:,}",
        "" if loss is None else f"{loss:.4f}",
        size(store.bytes_of(checkpoint)),
        written.strftime("%Y-%m-%d %H:%M"),
        f"{written_by['strategy']}, {counted(written_by['world_size'], 'process')}",
        ", ".join(marks),
    ]


def _describe_as_json(checkpoint: Path, best: Path | None) -> dict[str, Any]:
    """Return what is known of a checkpoint, as JSON values.

    Args:
        best: the run's checkpoint with the lowest held-out loss.
    """
    reason = store.find_damage(checkpoint)
    if reason is not None:
        return {"folder": str(checkpoint), "damage": reason}
    return {
        "folder": str(checkpoint),
        "damage": None,
        "best": checkpoint == best,
        "pinned": store.is_pinned(checkpoint),
        "bytes": store.bytes_of(checkpoint),
        "written_by": store.read_json(checkpoint / "tensors.json")["written_by"],
        "held_out_loss": store.eval_loss(checkpoint),
        "progress": store.read_json(checkpoint / store.PROGRESS),
    }


def _format_step(checkpoint: Path) -> str:
    """Return ``12`` for the checkpoint ``step-000012``, and ``12 abandoned`` for ``step-000012.abandoned``."""
    step, _, kind = checkpoint.name.removeprefix("step-").partition(".")
    return f"{int(step)} {kind}".strip()


def _verify(checkpoints: list[Path], *, as_json: bool) -> int:
    """Read every byte, and print one line per checkpoint. Return 1 if one is damaged, else 0."""
    from zerobook.utils.bars import tqdm

    total = 0
    for checkpoint in checkpoints:
        # The progress bar needs the number of all bytes in advance. A run that trains may prune a checkpoint meanwhile.
        with suppress(FileNotFoundError):
            total += sum(file.stat().st_size for file in checkpoint.iterdir() if file.is_file())
    damage = {}
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, leave=False) as bar:
        for checkpoint in checkpoints:
            reason = store.find_damage(checkpoint, thorough=True, tell=bar.update)
            # A checkpoint that the run has pruned meanwhile is not damaged, unless it is the only one to verify.
            if os.path.lexists(checkpoint) or len(checkpoints) == 1:
                damage[checkpoint] = reason
    if as_json:
        findings = [{"folder": str(checkpoint), "damage": reason} for checkpoint, reason in damage.items()]
        print(json.dumps(findings, indent=2))
    else:
        for checkpoint, reason in damage.items():
            say(f"{checkpoint}: undamaged" if reason is None else f"damaged: {reason}")
    return int(any(damage.values()))


def _inspect(checkpoint: Path) -> None:
    """Print the record of a checkpoint: who wrote it, its size, and the progress of the run."""
    description = _describe_as_json(checkpoint, store.find_best(checkpoint.parent))
    if description["damage"] is not None:
        raise CheckpointError(description["damage"])
    table = make_table(str(checkpoint), ("what", "value"))
    # Each entry of the progress has a row.
    progress = description.pop("progress")
    for key, value in (description | progress).items():
        table.add_row(key, str(value))
    console().print(table)

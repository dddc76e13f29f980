"""Folders on disk: staged, made durable, renamed when complete, and only then old ones pruned."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerobook.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d+)$")
_ABANDONED = re.compile(r"step-(\d+)\.abandoned$")


def folder_of(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint folder's name says."""
    match = _NAME.search(checkpoint.name)
    return int(match.group(1)) if match else -1


@contextmanager
def staged(checkpoints: Path, step: int) -> Iterator[Path]:
    """A folder to write into, which appears as ``step-N`` once the block ends without an error.

    Every file is listed with its size in the manifest, written and fsynced last; then the
    folder is renamed. A process killed at any moment leaves either a whole checkpoint or a
    ``.partial`` folder that no reader takes.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    final = checkpoints / f"step-{step:06d}"
    staging = checkpoints / f".{final.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    yield staging
    files = {f.name: {"bytes": f.stat().st_size} for f in sorted(staging.iterdir())}
    (staging / MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}, indent=1))
    for file in staging.iterdir():
        _fsync(file)
    _fsync(staging)
    replaced = checkpoints / f".{final.name}.replaced"
    if final.exists():  # the same step, saved again by a run that was continued from before it
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staging.rename(final)
    _fsync(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)


def complete(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    if not checkpoints.is_dir():
        return []
    found = [c for c in checkpoints.iterdir() if _NAME.match(c.name) and damage(c) is None]
    return sorted(found, key=step_of)


def damage(checkpoint: Path) -> str | None:
    """Why a folder is not a complete checkpoint, or None where it is one."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except OSError:
        return f"{checkpoint}: there is no {MANIFEST}; the save was not finished, or this is no checkpoint"
    except ValueError as error:
        return f"{checkpoint / MANIFEST}: not valid JSON: {error}"
    if manifest.get("format_version", 0) > FORMAT_VERSION:
        return f"{checkpoint}: format {manifest['format_version']} is newer than this version reads ({FORMAT_VERSION})"
    for name, facts in manifest["files"].items():
        file = checkpoint / name
        size = file.stat().st_size if file.is_file() else None
        if size != facts["bytes"]:
            return f"{file}: {'missing' if size is None else f'{size} bytes'}, the manifest says {facts['bytes']} bytes"
    return None


def find(output_dir: str | Path, asked: str | None) -> Path | None:
    """The checkpoint that ``--resume_from_checkpoint`` means: None, ``auto``, or a folder.

    ``auto`` is the newest complete one under ``output_dir``, or None where there is none yet.

    Raises:
        CheckpointError: a named folder that is not complete, or that is of another run than those in ``output_dir``.
    """
    if asked is None:
        return None
    if asked == "auto":
        return (complete(folder_of(output_dir)) or [None])[-1]
    checkpoint = Path(asked).expanduser()
    if not (checkpoint / MANIFEST).exists() and complete(folder_of(checkpoint)):
        checkpoint = complete(folder_of(checkpoint))[-1]  # a run's output_dir
    reason = damage(checkpoint)
    if reason is not None:
        raise CheckpointError(f"{reason}. Use --resume_from_checkpoint auto to take the newest complete one.")
    own = complete(folder_of(output_dir))
    if own and checkpoint.resolve().parent != folder_of(output_dir).resolve():
        raise CheckpointError(
            f"{checkpoint} is of another run than the {len(own)} checkpoint(s) in {output_dir}, the newest {own[-1].name}. "
            "Mixed, nobody could tell which to go on from. Pass --resume_from_checkpoint auto to go on from those, or another "
            "--output_dir."
        )
    return checkpoint


def set_aside(checkpoints: Path, step: int) -> list[Path]:
    """Rename complete checkpoints later than ``step``, where the run goes on from, to ``step-N.abandoned``.

    They belong to a branch that was given up: ``auto`` must not take them, and `prune` must not keep them instead of new
    ones. Named in full, one of them can still be resumed. Returns the new names.
    """
    later = [checkpoint for checkpoint in complete(checkpoints) if step_of(checkpoint) > step]
    renamed = [checkpoint.with_name(f"{checkpoint.name}.abandoned") for checkpoint in later]
    for checkpoint, name in zip(later, renamed, strict=True):
        shutil.rmtree(name, ignore_errors=True)
        checkpoint.rename(name)
    return renamed


def prune(checkpoints: Path, keep: int | None) -> list[Path]:
    """Delete all but the newest ``keep`` complete checkpoints, abandoned ones first; returns those deleted."""
    abandoned = sorted(c for c in checkpoints.iterdir() if _ABANDONED.match(c.name))
    old = [*abandoned, *complete(checkpoints)][:-keep] if keep else []
    for checkpoint in old:
        shutil.rmtree(checkpoint)
    return old


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

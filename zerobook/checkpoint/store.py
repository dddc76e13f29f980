"""Folders on disk: staged, made durable, renamed when complete, and only then old ones pruned.

checkpoints/step-000012             complete: every file is in its manifest, with size and digest
checkpoints/step-000012.pinned      an empty file: step 12 is never pruned
checkpoints/step-000018.abandoned   complete, but of a branch that was given up
checkpoints/.step-...               being written or deleted; whoever writes next clears it away
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerobook.errors import CheckpointError

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d+)$")
_ABANDONED = re.compile(r"step-(\d+)\.abandoned$")
_LEFTOVER = re.compile(r"\.step-\d+(\.abandoned)?\.(partial|replaced|deleted)$")
_BLOCK = 1 << 22
_GRACE_S = 15
"""Loaders' processes hold a killed run's lock until they notice that it is gone."""


def folder_of(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint folder's name says."""
    match = _NAME.search(checkpoint.name)
    return int(match.group(1)) if match else -1


@contextmanager
def owned(checkpoints: Path) -> Iterator[None]:
    """Hold ``checkpoints`` for one run; another process that tries to is refused.

    Raises:
        CheckpointError: names who holds it.
    """
    import filelock

    checkpoints.mkdir(parents=True, exist_ok=True)
    holder = checkpoints / f"{LOCK}.holder"
    lock = filelock.FileLock(checkpoints / LOCK)
    try:
        lock.acquire(timeout=_GRACE_S)
    except (OSError, NotImplementedError) as error:
        if not isinstance(error, filelock.Timeout):
            yield  # some network filesystems have no locks
            return
        who = holder.read_text() if holder.exists() else "another process"
        raise CheckpointError(
            f"{checkpoints}: {who} is training into this folder. Two runs there would overwrite each other: wait for it, stop "
            "it, or give this run another --output_dir."
        ) from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        sweep(checkpoints)
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


@contextmanager
def staged(checkpoints: Path, step: int) -> Iterator[Path]:
    """A folder to write into, which appears as ``step-N`` once the block ends without an error.

    Every file is listed with size and digest in the manifest, written last; all is fsynced, then the folder is renamed. A
    process killed at any moment leaves either a whole checkpoint or a hidden folder that no reader takes.
    """
    staging = staging_of(checkpoints, step)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    publish(staging, step)


def staging_of(checkpoints: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return checkpoints / f".step-{step:06d}.partial"


def publish(staging: Path, step: int, digests: dict[str, str] | None = None) -> None:
    """Make a complete checkpoint of the files in ``staging``; those in ``digests`` are durable already, and not read again."""
    checkpoints, digests = staging.parent, digests or {}
    others = [file for file in sorted(staging.iterdir()) if file.name not in digests]
    digests = digests | {file.name: digest(file) for file in others}
    files = {name: {"bytes": (staging / name).stat().st_size, "xxh3_128": found} for name, found in sorted(digests.items())}
    manifest = staging / MANIFEST
    manifest.write_text(json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}, indent=1))
    for file in (*others, manifest, staging):
        fsync(file)
    final = checkpoints / f"step-{step:06d}"
    replaced = checkpoints / f".{final.name}.replaced"
    if final.exists():  # the same step, saved again by a run that was continued from before it
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staging.rename(final)
    fsync(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)


def sweep(checkpoints: Path) -> None:
    """Delete what a killed writer left half written or half deleted."""
    for folder in checkpoints.iterdir():
        if _LEFTOVER.match(folder.name):
            shutil.rmtree(folder)


def digest(file: Path, tell: Callable[[int], Any] = lambda count: None) -> str:
    """xxh3_128 of the content; ``tell`` is called with the bytes of every block read."""
    import xxhash

    found = xxhash.xxh3_128()
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK):
            found.update(block)
            tell(len(block))
    return found.hexdigest()


def complete(checkpoints: Path) -> list[Path]:
    """Checkpoints whose files are all there, oldest step first. Only sizes are looked at."""
    if not checkpoints.is_dir():
        return []
    found = [c for c in checkpoints.iterdir() if _NAME.match(c.name) and damage(c) is None]
    return sorted(found, key=step_of)


def candidates(checkpoints: Path) -> list[Path]:
    """All that is called a checkpoint, damaged or not, oldest step first."""
    if not checkpoints.is_dir():
        return []
    return sorted((c for c in checkpoints.iterdir() if _NAME.match(c.name)), key=step_of)


def damage(checkpoint: Path, *, thorough: bool = False, tell: Callable[[int], Any] = lambda count: None) -> str | None:
    """Why a folder is not a complete checkpoint, or None where it is one.

    Args:
        thorough: read every byte and compare digests, not sizes alone.
        tell: called with the bytes of every block read.
    """
    if checkpoint.is_symlink():
        return f"{checkpoint}: it is a link, and what it leads to may change or be another run's"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        version, step, files = manifest["format_version"], manifest["step"], dict(manifest["files"])
    except OSError:
        return f"{checkpoint}: there is no {MANIFEST}; the save was not finished, or this is no checkpoint"
    except (ValueError, KeyError, TypeError) as error:
        return f"{checkpoint / MANIFEST}: cannot be read: {type(error).__name__}: {error}"
    if version != FORMAT_VERSION:
        age = "newer than this version reads" if version > FORMAT_VERSION else "older than this version reads"
        return f"{checkpoint}: format {version} is {age} ({FORMAT_VERSION}); use the version of Zerobook that wrote it"
    named = _NAME.match(checkpoint.name.removesuffix(".abandoned"))
    if named and int(named.group(1)) != step:
        return f"{checkpoint / MANIFEST}: it is the manifest of step {step}"
    for name, facts in files.items():
        file = checkpoint / name
        if Path(name).name != name or file.is_symlink():
            return f"{file}: it leads out of the checkpoint's folder"
        size = file.stat().st_size if file.is_file() else None
        if size != facts["bytes"]:
            return f"{file}: {'missing' if size is None else f'{size} bytes'}, the manifest says {facts['bytes']} bytes"
    for name, facts in files.items() if thorough else ():
        found = digest(checkpoint / name, tell)
        if found != facts["xxh3_128"]:
            return f"{checkpoint / name}: its content is damaged: digest {found}, the manifest says {facts['xxh3_128']}"
    return None


def bytes_of(checkpoint: Path) -> int:
    """Of all files that the manifest lists."""
    return sum(facts["bytes"] for facts in read_json(checkpoint / MANIFEST)["files"].values())


def find(output_dir: str | Path, asked: str | None, *, passed_over: list[str] | None = None) -> Path | None:
    """The checkpoint that ``--resume_from_checkpoint`` means: None, ``auto``, ``best``, or a folder.

    ``auto`` is the newest one under ``output_dir``, or None where there is none yet; ``best`` the one with the lowest
    held-out loss.

    Args:
        passed_over: given, every byte is read and compared with its digest, and why newer checkpoints were not taken is
            appended here. Without it sizes alone are compared, which every process of a launch can afford.

    Raises:
        CheckpointError: a named folder that is not complete, or that is of another run than those in ``output_dir``;
            ``best`` where none was evaluated.
    """
    if asked is None:
        return None
    thorough = passed_over is not None
    if asked in ("auto", "best"):
        order = candidates(folder_of(output_dir))
        if asked == "best":
            order = sorted((c for c in order if eval_loss(c) is not None), key=eval_loss, reverse=True)  # type: ignore[arg-type,type-var]
        for checkpoint in reversed(order):
            reason = damage(checkpoint, thorough=thorough)
            if reason is None:
                return checkpoint
            if passed_over is not None:
                passed_over.append(reason)
        if asked == "best":
            raise CheckpointError(
                f"{output_dir}: no complete checkpoint there was saved at a step that was evaluated, so none is the best. Let "
                "--save_steps be a multiple of --eval_steps, or pass --resume_from_checkpoint auto."
            )
        return None
    checkpoint = Path(asked).expanduser()
    if not (checkpoint / MANIFEST).exists() and complete(folder_of(checkpoint)):
        checkpoint = complete(folder_of(checkpoint))[-1]  # a run's output_dir
    reason = damage(checkpoint, thorough=thorough)
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


def eval_loss(checkpoint: Path) -> float | None:
    """The held-out loss at a checkpoint's step; None where it was not evaluated there."""
    try:
        return json.loads((checkpoint / PROGRESS).read_text())["eval_loss"]
    except (OSError, ValueError, KeyError):
        return None


def best(checkpoints: Path) -> Path | None:
    """The complete checkpoint with the lowest held-out loss; None where none was evaluated."""
    evaluated = [c for c in complete(checkpoints) if eval_loss(c) is not None]
    return min(evaluated, key=eval_loss, default=None)  # type: ignore[arg-type]


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


def pin(checkpoint: Path, wanted: bool = True) -> None:
    """Keep a checkpoint from being pruned, or no longer."""
    marker = _marker(checkpoint)
    marker.touch() if wanted else marker.unlink(missing_ok=True)


def is_pinned(checkpoint: Path) -> bool:
    return _marker(checkpoint).exists()


def _marker(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.pinned")


def prune(checkpoints: Path, keep: int | None, protected: Collection[int] = ()) -> list[Path]:
    """Delete all but the newest ``keep`` complete checkpoints, abandoned ones first; returns those deleted.

    Those that are pinned, those of the steps ``protected``, and the one with the lowest held-out loss, stay besides.
    """
    abandoned = sorted(c for c in checkpoints.iterdir() if _ABANDONED.match(c.name))
    there = [c for c in (*abandoned, *complete(checkpoints)) if not is_pinned(c)]
    favourite = best(checkpoints)
    old = [c for c in (there[:-keep] if keep else []) if c != favourite and step_of(c) not in protected]
    for checkpoint in old:
        doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
        checkpoint.rename(doomed)  # at once no checkpoint any more, however far the deletion comes
        shutil.rmtree(doomed)
    return old


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoint folders on disk: staged, made durable, renamed when complete. Only then are old ones pruned.

checkpoints/step-000012             complete: every file is in its manifest, with size and digest
checkpoints/step-000012.pinned      an empty file: step 12 is never pruned
checkpoints/step-000018.abandoned   complete, but of a branch that was given up; may be pinned too
checkpoints/step-000024.unreadable  could not be read, and another one took its name; never removed
checkpoints/.step-...               being written, replaced or deleted; `sweep` deletes it

If a name is taken, a number is added: ``step-000018.abandoned-2``.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from zerobook.errors import CheckpointError
from zerobook.utils import locks, reading
from zerobook.utils.files import fsync
from zerobook.utils.terminal import plain, say
from zerobook.utils.units import counted
from zerobook.utils.writing import refuse_link, write_whole

FORMAT_VERSION = 5
"""Format of a checkpoint with slices, or with the state of another optimizer than AdamW. Others have format 4, which earlier
versions can read."""
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
_LISTED: dict[int, tuple[str, ...]] = {3: ("config.json", "tensors.json", PROGRESS)}
_LISTED |= dict.fromkeys((4, 5), (*_LISTED[3], "buffers.safetensors"))
"""Files that a manifest of each format must list. A file without a digest could have any content."""
LOCK = ".lock"
_NAME = re.compile(r"step-(\d+)$")
_ASIDE = re.compile(r"(step-\d+)\.(abandoned|unreadable)(-\d+)?$")
_LEFTOVER = re.compile(r"\.(step-\d+).*\.(partial|replaced|deleted)(-\d+)?$")
_PIN = ".pinned"
_GRACE_S = 15
"""Seconds to wait for a lock: loader processes of a killed run hold it until they notice its end."""


def folder_of(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in the name of a checkpoint's folder; -1 if there is none."""
    match = _NAME.search(checkpoint.name)
    return int(match.group(1)) if match else -1


_HELD: dict[Path, ExitStack] = {}


def hold(checkpoints: Path) -> None:
    """Lock ``checkpoints`` until this process ends, see `owned`. Nothing changes where this process has locked it already."""
    key = checkpoints.resolve()
    if key not in _HELD:
        stack = ExitStack()
        stack.enter_context(owned(checkpoints))
        atexit.register(stack.close)
        _HELD[key] = stack


def release(checkpoints: Path) -> None:
    """Unlock ``checkpoints`` before this process ends, if `hold` has locked it."""
    if stack := _HELD.pop(checkpoints.resolve(), None):
        atexit.unregister(stack.close)
        stack.close()


@contextmanager
def owned(checkpoints: Path, *, wait: float | None = None) -> Iterator[None]:
    """Lock ``checkpoints`` for this process, and sweep it. Another process that tries to lock it is refused.

    On a file system without locks, no process is refused, and nothing is swept: another process may be writing there.

    Args:
        wait: seconds to wait for another process that holds the lock. The default is long enough for a killed run to end.

    Raises:
        CheckpointError: another process holds the lock; the message names it.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    holder = checkpoints / f"{LOCK}.holder"
    with locks.locked(checkpoints / LOCK, wait=_GRACE_S if wait is None else wait) as locked:
        if locked is False:
            who = ""
            with suppress(OSError, UnicodeDecodeError):
                who = plain(reading.read_text(holder), lines=False)
            raise CheckpointError(
                f"{checkpoints}: {who or 'another process'} uses this folder. Two processes there would delete each other's "
                "checkpoints. Wait for that process or stop it, or give a new run another --output_dir."
            )
        if locked is None:
            words = f"WARNING: {checkpoints}: its file system has no locks, so a second run that writes there is not refused."
            say(words, file=sys.stderr)
            yield
            return
        try:
            with suppress(OSError):  # only a message needs it, and the disk may be full
                write_whole(holder, f"process {os.getpid()} on {socket.gethostname()}")
            sweep(checkpoints)
            yield
        finally:
            with suppress(OSError):
                holder.unlink()


def name_of(step: int) -> str:
    """Return the name of the folder of a complete checkpoint."""
    return f"step-{step:06d}"


def staging_of(checkpoints: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return checkpoints / f".{name_of(step)}.partial"


def make_staging(staging: Path) -> None:
    """Make an empty folder. Files that a killed save left there must not become part of this save."""
    if os.path.lexists(staging):
        _delete(_hide(staging))
    staging.mkdir(parents=True)


def publish(staging: Path, step: int, digests: dict[str, str] | None = None, version: int = FORMAT_VERSION) -> None:
    """Make a complete checkpoint of the files in ``staging``.

    Every file is listed with size and digest in the manifest, written last; all is fsynced, then the folder is renamed. A
    process killed at any moment leaves either a whole checkpoint or a hidden folder that no reader takes. Where there is a
    checkpoint of that step, it is deleted after the new one is durable; if it is pinned or cannot be read, it is set aside
    instead.

    Args:
        digests: of files that are durable already; they are not read again.
        version: of the format.
    """
    checkpoints, digests = staging.parent, digests or {}
    others = [file for file in sorted(staging.iterdir()) if file.name not in digests]
    digests = digests | {file.name: reading.file_digest(file) for file in others}
    files = {name: {"bytes": (staging / name).stat().st_size, "xxh3_128": found} for name, found in sorted(digests.items())}
    manifest = staging / MANIFEST
    manifest.write_text(json.dumps({"format_version": version, "step": step, "files": files}, indent=1))
    for file in (*others, manifest, staging):
        fsync(file)
    final = checkpoints / name_of(step)
    replaced = None
    if os.path.lexists(final):
        if damage(final, thorough=True) is not None:
            _put_aside(final, "unreadable")
        elif is_pinned(final):
            _put_aside(final, "abandoned")
        else:
            replaced = _free(checkpoints / f".{final.name}.replaced")
            final.rename(replaced)
    staging.rename(final)
    fsync(checkpoints)
    if replaced is not None:
        with _warned(replaced):
            _delete(_hide(replaced))  # `sweep` treats a folder named replaced as complete


def sweep(checkpoints: Path) -> None:
    """Delete folders that a killed writer left half written or half deleted, and pins without a checkpoint.

    A folder that cannot be deleted stays, with a warning, until the next sweep.
    """
    for folder in sorted(checkpoints.iterdir()):
        leftover = _LEFTOVER.match(folder.name)
        if leftover is None:
            continue
        final = checkpoints / leftover.group(1)
        if leftover.group(2) == "replaced" and not os.path.lexists(final):
            with _warned(folder):  # the writer was killed before the new checkpoint had its name
                folder.rename(final)
        else:
            _delete(folder)
    for marker in checkpoints.glob(f"step-*{_PIN}"):
        if not os.path.lexists(marker.with_name(marker.name.removesuffix(_PIN))):
            with _warned(marker):
                marker.unlink()


def _hide(folder: Path) -> Path:
    """Rename a folder to a hidden name, and return that. No reader takes it, even if its deletion is interrupted."""
    doomed = _free(folder.with_name(f".{folder.name.lstrip('.')}.deleted"))
    folder.rename(doomed)
    return doomed


def _delete(folder: Path) -> None:
    with _warned(folder):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        else:
            shutil.rmtree(folder)


@contextmanager
def _warned(path: Path) -> Iterator[None]:
    """Turn an error while ``path`` is cleaned up into a warning: nothing that is kept depends on it."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        words = f"WARNING: {path}: it cannot be cleaned up ({where}{error.strerror or error}); the next start tries again."
        say(words, file=sys.stderr)


def _free(path: Path) -> Path:
    """Return ``path``, with a number added if that name is taken."""
    found, number = path, 1
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _put_aside(checkpoint: Path, kind: str) -> Path:
    """Rename a checkpoint to ``step-N.KIND``, and its pin with it. Returns the new path."""
    aside = _free(checkpoint.with_name(f"{checkpoint.name}.{kind}"))
    pinned = is_pinned(checkpoint)
    pin(aside, pinned)  # before the rename: a kill between the two must not leave the checkpoint without its pin
    checkpoint.rename(aside)
    pin(checkpoint, False)
    return aside


def complete(checkpoints: Path) -> list[Path]:
    """Return the checkpoints whose files are all there, oldest step first. No tensors are read, see `damage`."""
    return [c for c in candidates(checkpoints) if damage(c) is None]


def candidates(checkpoints: Path) -> list[Path]:
    """Return all folders with a checkpoint's name, damaged or not, oldest step first."""
    if not checkpoints.is_dir():
        return []
    return sorted((c for c in checkpoints.iterdir() if _NAME.match(c.name)), key=step_of)


def all_of(checkpoints: Path) -> list[Path]:
    """Return every checkpoint's folder: whole, damaged, abandoned or unreadable."""
    return [*candidates(checkpoints), *list_aside(checkpoints, "abandoned"), *list_aside(checkpoints, "unreadable")]


def list_aside(checkpoints: Path, kind: str) -> list[Path]:
    """Return the folders that were set aside as ``kind``: ``abandoned`` or ``unreadable``."""
    if not checkpoints.is_dir():
        return []
    named = [(c, _ASIDE.match(c.name)) for c in sorted(checkpoints.iterdir())]
    return [c for c, match in named if match is not None and match.group(2) == kind]


def damage(checkpoint: Path, *, thorough: bool = False, tell: Callable[[int], Any] = lambda count: None) -> str | None:
    """Return why a folder is not a complete checkpoint, or None where it is one.

    The digests of JSON files are always compared: they are cheap, and values from them (the batch size, the losses) must not
    be of a checkpoint that a thorough check rejects. Of all other files, the sizes are compared.

    Args:
        thorough: read every byte of the other files too, and compare their digests.
        tell: called with the bytes of every block read.
    """
    try:
        return _damage(checkpoint, thorough, tell)
    except OSError as error:
        return f"{error.filename or checkpoint}: it cannot be read: {error.strerror or error}"


def _damage(checkpoint: Path, thorough: bool, tell: Callable[[int], Any]) -> str | None:
    if checkpoint.is_symlink():
        return f"{checkpoint}: it is a symbolic link; its target may change or belong to another run"
    try:
        manifest = reading.read_json(checkpoint / MANIFEST)
        version, step = manifest["format_version"], manifest["step"]
        files = {name: (facts["bytes"], facts["xxh3_128"]) for name, facts in manifest["files"].items()}
        newer = version > FORMAT_VERSION
    except (FileNotFoundError, NotADirectoryError):
        return f"{checkpoint}: there is no {MANIFEST}; the save was not finished, or this is not a checkpoint"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{checkpoint / MANIFEST}: cannot be read: {type(error).__name__}: {error}"
    if version not in _LISTED:
        reads = " and ".join(map(str, _LISTED))
        return (
            f"{checkpoint}: format {version} is {'newer' if newer else 'older'} than this version reads ({reads}); use the "
            "version of Zerobook that wrote it"
        )
    named = _NAME.match(checkpoint.name.partition(".")[0])
    if named and int(named.group(1)) != step:
        return f"{checkpoint / MANIFEST}: it is the manifest of step {step}"
    for name, (wanted, _) in files.items():
        file = checkpoint / name
        if Path(name).name != name or file.is_symlink():
            return f"{file}: its path leads out of the checkpoint's folder"
        size = file.stat().st_size if file.is_file() else None
        if size is None or size != wanted:
            return f"{file}: {'missing' if size is None else f'{size} bytes'}, the manifest says {wanted} bytes"
    unlisted = [name for name in _LISTED[version] if name not in files]
    if unlisted:
        return f"{checkpoint / MANIFEST}: it does not list {', '.join(unlisted)}; these may belong to another checkpoint"
    for name, (_, wanted) in files.items():
        if not thorough and not name.endswith(".json"):
            continue
        found = reading.file_digest(checkpoint / name, tell)
        if found != wanted:
            return f"{checkpoint / name}: its content is damaged: digest {found}, the manifest says {wanted}"
    return None


def bytes_of(checkpoint: Path) -> int:
    """Return the bytes of all files in the manifest."""
    return sum(facts["bytes"] for facts in read_json(checkpoint / MANIFEST)["files"].values())


def find(output_dir: str | Path, asked: str | None, *, passed_over: dict[Path, str] | None = None) -> Path | None:
    """Return the checkpoint that ``--resume_from_checkpoint`` means: None, ``auto``, ``best``, or a folder of one, or of a run.

    ``auto`` is the newest whole one under ``output_dir``, or None where there is none yet; ``best`` the one with the lowest
    held-out loss; a run's folder is the newest whole one of that run.

    Args:
        passed_over: given, every byte is read and compared with its digest, and the checkpoints that were not taken are
            added here, each with the reason. Without it no tensors are read, which is cheap enough for every process.

    Raises:
        CheckpointError: there are checkpoints and none can be read, or all were given up; a named folder that is not
            complete, or that is of another run than those in ``output_dir``, be these given up or unreadable; ``best``
            where none was evaluated.
    """
    if asked is None:
        return None
    thorough = passed_over is not None
    reasons: dict[Path, str] = {} if passed_over is None else passed_over
    if asked in ("auto", "best"):
        checkpoints = folder_of(output_dir)
        order = candidates(checkpoints) if asked == "auto" else _by_loss(candidates(checkpoints))
        found = _newest_whole(order, thorough, reasons)
        if found is not None:
            return found
        if asked == "best" and not reasons:
            raise CheckpointError(
                f"{output_dir}: no complete checkpoint there was saved at a step that was evaluated, so none is the best. Let "
                "--save_steps be auto or a multiple of --eval_steps, or pass --resume_from_checkpoint auto."
            )
        if asked == "auto":
            reasons |= _reasons_aside(checkpoints)
        if reasons:
            raise CheckpointError(none_readable(output_dir, reasons))
        given_up = list_aside(checkpoints, "abandoned")
        if given_up:
            raise CheckpointError(only_abandoned(output_dir, given_up))
        return None
    checkpoint = Path(asked).expanduser()
    theirs = folder_of(checkpoint)
    if not (checkpoint / MANIFEST).exists() and candidates(theirs):  # a run's output_dir
        if theirs.resolve() == folder_of(output_dir).resolve():
            theirs = folder_of(output_dir)  # `set_aside` knows those passed over by these paths
        found = _newest_whole(candidates(theirs), thorough, reasons)
        if found is None:
            raise CheckpointError(f"{_listed(asked, reasons)}\nMake one of them readable, or name another run or checkpoint.")
        checkpoint = found
    else:
        reason = damage(checkpoint, thorough=thorough)
        if reason is not None:
            raise CheckpointError(f"{reason}. {_way_back(checkpoint, thorough)}")
    if checkpoint.resolve().parent == folder_of(output_dir).resolve():
        return checkpoint
    own = complete(folder_of(output_dir))
    if own:
        raise CheckpointError(
            f"{checkpoint} is of another run than the {counted(len(own), 'checkpoint')} in {output_dir}, the newest "
            f"{own[-1].name}. With both in one folder, auto could not choose. Pass --resume_from_checkpoint auto to "
            "resume from those, or "
            "another --output_dir."
        )
    problem = none_to_take(output_dir)
    if problem is not None:
        raise CheckpointError(problem)
    return checkpoint


def none_to_take(output_dir: str | Path) -> str | None:
    """Return the error message for a folder with checkpoints of which ``auto`` takes none; None if it has none.

    For folders without a complete checkpoint.
    """
    checkpoints = folder_of(output_dir)
    reasons = unreadable(checkpoints)
    if reasons:
        return none_readable(output_dir, reasons)
    given_up = list_aside(checkpoints, "abandoned")
    return only_abandoned(output_dir, given_up) if given_up else None


def _newest_whole(order: list[Path], thorough: bool, reasons: dict[Path, str]) -> Path | None:
    """Return the last of ``order`` that is whole, or None; later ones are added to ``reasons``."""
    for checkpoint in reversed(order):
        reason = damage(checkpoint, thorough=thorough)
        if reason is None:
            return checkpoint
        reasons[checkpoint] = reason
    return None


def _way_back(checkpoint: Path, thorough: bool) -> str:
    """Return advice on what to resume from instead of a damaged ``checkpoint``. In a new folder, ``auto`` would begin anew."""
    named = _NAME.match(checkpoint.name.partition(".")[0])
    older = [c for c in candidates(checkpoint.parent) if named is None or step_of(c) < int(named.group(1))]
    found = _newest_whole(older, thorough, {})
    if found is None:
        return "There is no complete checkpoint before it in its folder. Name another run or checkpoint."
    return f"Use --resume_from_checkpoint {found}, the newest complete checkpoint before it."


def none_readable(output_dir: str | Path, reasons: dict[Path, str]) -> str:
    """Return the error message for a folder with checkpoints of which none can be read."""
    return (
        f"{_listed(output_dir, reasons)}\n"
        "Another run there would replace them. Make one of them readable, or give another --output_dir."
    )


def _listed(folder: str | Path, reasons: dict[Path, str]) -> str:
    listed = "\n".join(f"  {reason}" for reason in reasons.values())
    return f"{folder}: it holds {counted(len(reasons), 'checkpoint')}, and none of them can be read:\n{listed}"


def only_abandoned(output_dir: str | Path, given_up: list[Path]) -> str:
    """Return the error message for a folder with checkpoints that were all given up."""
    return (
        f"{output_dir}: all {counted(len(given_up), 'checkpoint')} there are of branches that were given up: "
        f"{', '.join(c.name for c in given_up)}. Another run there would prune them. Go on from one with "
        f"--resume_from_checkpoint {given_up[-1]}, or give another --output_dir."
    )


def unreadable(checkpoints: Path) -> dict[Path, str]:
    """Return the checkpoints that cannot be read, also those set aside, each with the reason. No tensors are read."""
    there = {c: reason for c in candidates(checkpoints) if (reason := damage(c)) is not None}
    return there | _reasons_aside(checkpoints)


def _reasons_aside(checkpoints: Path) -> dict[Path, str]:
    words = "it was set aside because it could not be read; --resume_from_checkpoint with its path tries it again"
    return {c: damage(c) or f"{c}: {words}" for c in list_aside(checkpoints, "unreadable")}


def eval_loss(checkpoint: Path) -> float | None:
    """Return the held-out loss at a checkpoint's step; None where it was not evaluated there, or is not finite."""
    try:
        loss = reading.read_json(checkpoint / PROGRESS)["eval_loss"]
        return loss if math.isfinite(loss) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def held_out_fingerprint(checkpoint: Path) -> str:
    """Return the fingerprint of the data that a checkpoint's held-out loss was measured on; empty where it is not recorded."""
    try:
        return str(reading.read_json(checkpoint / PROGRESS)["held_out_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _by_loss(checkpoints: list[Path]) -> list[Path]:
    """Return the evaluated ones of ``checkpoints``, which are oldest first, by their loss, the lowest last.

    Only losses on the same held-out data are comparable: those of other data than the newest complete one's are left out.
    """
    evaluated = [c for c in checkpoints if eval_loss(c) is not None]
    newest = next((c for c in reversed(evaluated) if damage(c) is None), None)
    if newest is not None:
        fingerprint = held_out_fingerprint(newest)
        evaluated = [c for c in evaluated if held_out_fingerprint(c) == fingerprint]
    return sorted(evaluated, key=eval_loss, reverse=True)  # type: ignore[arg-type]  # all of them have a loss


def best(checkpoints: Path) -> Path | None:
    """Return the complete checkpoint with the lowest held-out loss, see `_by_loss`; None where none was evaluated."""
    return next(reversed(_by_loss(complete(checkpoints))), None)


def set_aside(checkpoints: Path, step: int, unreadable: Collection[Path] = ()) -> list[Path]:
    """Rename the checkpoints later than ``step``, from which the run resumes. Returns the new paths.

    They belong to a branch that was given up: ``auto`` must not take them, and `prune` must not keep them instead of new
    ones. Whole ones become ``step-N.abandoned``; named in full, one of them can still be resumed. Those that cannot be
    read become ``step-N.unreadable``.

    Args:
        unreadable: checkpoints that were found damaged when every byte was read. Here no tensors are read.
    """
    later = [checkpoint for checkpoint in candidates(checkpoints) if step_of(checkpoint) > step]
    whole = {c for c in later if c not in unreadable and damage(c) is None}
    # newest first: after a kill between two, `auto` takes the one that is nearest to ``step``
    aside = [_put_aside(c, "abandoned" if c in whole else "unreadable") for c in reversed(later)]
    return aside[::-1]


def take_back(checkpoint: Path, step: int) -> Path:
    """Restore the name and the pin of a checkpoint that was set aside, for a run that resumes from it. Returns its path.

    Another one of that step is set aside: otherwise a restart before the next save would resume from the other branch.
    """
    own = checkpoint.with_name(name_of(step))
    if os.path.lexists(own):
        _put_aside(own, "abandoned" if damage(own) is None else "unreadable")
    pinned = is_pinned(checkpoint)
    pin(own, pinned)
    checkpoint.rename(own)
    pin(checkpoint, False)
    return own


def pin(checkpoint: Path, wanted: bool = True) -> None:
    """Keep a checkpoint from being pruned, or with ``wanted`` False, allow it again."""
    marker = _marker(checkpoint)
    if wanted:
        open(marker, "ab", opener=refuse_link).close()
    else:
        marker.unlink(missing_ok=True)


def is_pinned(checkpoint: Path) -> bool:
    return _marker(checkpoint).exists()


def _marker(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}{_PIN}")


def prune(checkpoints: Path, keep: int | None, protected: Collection[int] = (), *, keep_best: bool = True) -> list[Path]:
    """Delete all but the newest ``keep`` complete checkpoints, abandoned ones first; returns those deleted.

    Also kept: pinned ones, those of the steps ``protected``, the one with the lowest held-out loss, and all that cannot be
    read. If one cannot be deleted, that is a warning.

    Args:
        keep_best: keep the one with the lowest held-out loss.
    """
    gone: list[Path] = []
    with _warned(checkpoints):
        abandoned = [c for c in list_aside(checkpoints, "abandoned") if damage(c) is None]
        there = [c for c in (*abandoned, *complete(checkpoints)) if not is_pinned(c)]
        favourite = best(checkpoints) if keep_best else None
        for checkpoint in there[:-keep] if keep else []:
            if checkpoint == favourite or step_of(checkpoint) in protected or is_pinned(checkpoint):
                continue  # a person may pin while the run prunes
            with _warned(checkpoint):
                hidden = _hide(checkpoint)
                gone.append(checkpoint)
                _delete(hidden)
    return gone


def read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = reading.read_json(file)
        return content
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error

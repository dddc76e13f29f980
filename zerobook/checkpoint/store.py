"""Checkpoint folders on disk: publish, list, check, rename, pin and prune them.

A checkpoint is written into a staging folder, flushed to disk, and renamed when it is complete. Old checkpoints are pruned only
after that. A checkpoint is *set aside* by a new name. A run resumes from it only if the user names its path.

checkpoints/step-000012             complete: every file is in its manifest, with size and digest
checkpoints/step-000012.pinned      an empty file: step 12 is never pruned
checkpoints/step-000018.abandoned   complete, but of a branch that was abandoned; may be pinned too
checkpoints/step-000024.unreadable  could not be read, and was renamed when the run saved step 24 again; never removed
checkpoints/.step-...               being written, replaced or deleted; `sweep` deletes it

If a name is taken, a number is added: ``step-000018.abandoned-2``.
"""

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
from typing import Any, cast

from zerobook.errors import CheckpointError, LockedError
from zerobook.utils import locks, reading
from zerobook.utils.files import fsync
from zerobook.utils.terminal import plain, say
from zerobook.utils.writing import refuse_link, write_whole

# Format of checkpoints with slices, or of another optimizer than AdamW. All others are written in format 4, which earlier
# versions can read.
FORMAT_VERSION = 5
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
_READABLE_VERSIONS = (4, FORMAT_VERSION)
# Files that a manifest must list with their digests. Without a digest, damage could not be seen.
_REQUIRED_FILES = ("config.json", "tensors.json", PROGRESS, "buffers.safetensors")
LOCK = ".lock"
# Name of a checkpoint's folder.
_NAME = re.compile(r"step-(\d+)$")
# Name of a checkpoint that was set aside.
_NAME_ASIDE = re.compile(r"(step-\d+)\.(abandoned|unreadable)(-\d+)?$")
# Name of a folder that was being written, replaced or deleted when its process was killed.
_LEFTOVER = re.compile(r"\.(step-\d+).*\.(partial|replaced|deleted)(-\d+)?$")
_PIN_SUFFIX = ".pinned"
# Seconds to wait for a lock: loader processes of a killed run hold it until they notice its end.
_GRACE_S = 15


def folder_of(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder; -1 if it does not end with a step, as after it was set aside."""
    match = _NAME.search(checkpoint.name)
    return int(match.group(1)) if match else -1


def step_before_suffix(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name, with or without a suffix such as ``.abandoned``; None if there is none."""
    match = _NAME.match(checkpoint.name.partition(".")[0])
    return int(match.group(1)) if match else None


# Folder that this process has locked -> the stack that unlocks it when it is closed.
_LOCKS: dict[Path, ExitStack] = {}


def lock_until_exit(checkpoints: Path) -> None:
    """Lock ``checkpoints`` until this process ends, see `locked`. Do nothing if this process has locked it already."""
    key = checkpoints.resolve()
    if key not in _LOCKS:
        stack = ExitStack()
        stack.enter_context(locked(checkpoints))
        atexit.register(stack.close)
        _LOCKS[key] = stack


def unlock(checkpoints: Path) -> None:
    """Unlock ``checkpoints`` before this process ends, if `lock_until_exit` has locked it."""
    stack = _LOCKS.pop(checkpoints.resolve(), None)
    if stack is not None:
        atexit.unregister(stack.close)
        stack.close()


@contextmanager
def locked(checkpoints: Path, *, wait: float | None = None) -> Iterator[None]:
    """Return a context in which this process has locked ``checkpoints``, after sweeping it (see `sweep`).

    On a file system without locks, no process is refused, and nothing is swept: another process may be writing there.

    Args:
        wait: seconds to wait for another process that holds the lock. The default is long enough for a killed run to end.

    Raises:
        LockedError: another process holds the lock; the message names it.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    holder_file = checkpoints / f"{LOCK}.holder"
    with locks.locked(checkpoints / LOCK, wait=_GRACE_S if wait is None else wait) as is_locked:
        if is_locked is False:
            holder_name = ""
            with suppress(OSError, UnicodeDecodeError):
                holder_name = plain(reading.read_text(holder_file), lines=False)
            raise LockedError(
                f"{checkpoints}: {holder_name or 'another process'} uses this folder. Two processes there would delete each "
                "other's checkpoints. Wait for that process or stop it, or give a new run another --output_dir. If its host is "
                f"gone for good, a network disk may keep its lock for ever: delete {checkpoints / LOCK}"
            )
        # None: the file system has no locks.
        if is_locked is None:
            say(
                f"WARNING: {checkpoints}: its file system has no locks, so a second run that writes there is not refused.",
                file=sys.stderr,
            )
            yield
            return
        try:
            # The name of the holder is only for a message. If it cannot be written, as on a full disk, the run goes on.
            with suppress(OSError):
                write_whole(holder_file, f"process {os.getpid()} on {socket.gethostname()}")
            sweep(checkpoints)
            yield
        finally:
            with suppress(OSError):
                holder_file.unlink()


def name_of(step: int) -> str:
    """Return the name of the folder of a complete checkpoint."""
    return f"step-{step:06d}"


def staging_of(checkpoints: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return checkpoints / f".{name_of(step)}.partial"


def make_staging(staging: Path) -> None:
    """Make an empty folder. Files that a killed save has left in it must not become part of this save, so they are deleted."""
    # Rename the old folder before it is deleted: if this process is killed meanwhile, none of its files stay under this name.
    if os.path.lexists(staging):
        _delete(_hide(staging))
    staging.mkdir(parents=True)


def publish(staging: Path, step: int, digests: dict[str, str], version: int = FORMAT_VERSION) -> None:
    """Make a complete checkpoint of the files in ``staging``: write their manifest, flush all to disk, and rename the folder.

    If the process is killed at any moment, there is either a complete checkpoint or a hidden folder that readers ignore. An
    earlier checkpoint of this step is deleted after the new one is on the disk. If it is pinned or cannot be read, it is set
    aside instead.

    Args:
        digests: name -> digest of the files that are flushed to disk already. They are not read again.
        version: of the format.
    """
    checkpoints = staging.parent
    final = checkpoints / name_of(step)

    # Write the manifest last, since a folder without it is not a checkpoint.
    unflushed = [file for file in sorted(staging.iterdir()) if file.name not in digests]
    digests = digests | {file.name: reading.file_digest(file) for file in unflushed}
    files = {}
    for name, digest in sorted(digests.items()):
        files[name] = {"bytes": (staging / name).stat().st_size, "xxh3_128": digest}
    manifest = staging / MANIFEST
    manifest.write_text(json.dumps({"format_version": version, "step": step, "files": files}, indent=1))
    for file in (*unflushed, manifest, staging):
        fsync(file)

    # Free the name, and give it to the new checkpoint. A rename is atomic. The earlier checkpoint is not deleted before that.
    replaced = None
    if os.path.lexists(final):
        if find_damage(final, thorough=True) is not None:
            _set_one_aside(final, "unreadable")
        elif is_pinned(final):
            _set_one_aside(final, "abandoned")
        else:
            replaced = _find_free_name(checkpoints / f".{final.name}.replaced")
            final.rename(replaced)
    staging.rename(final)
    # The checkpoint is complete once its name is on the disk.
    fsync(checkpoints)
    if replaced is not None:
        with _warning_on_error(replaced):
            # Rename it before it is deleted: `sweep` may restore a folder named replaced, and it must not restore half of one.
            _delete(_hide(replaced))


def sweep(checkpoints: Path) -> None:
    """Remove what a killed process has left in ``checkpoints``.

    A replaced checkpoint gets its name back if the new one was not completed. All other folders that a save or a
    deletion has left are deleted, and so are pins without a checkpoint. What cannot be deleted stays until the next sweep, and
    a warning is printed.
    """
    for folder in sorted(checkpoints.iterdir()):
        # Touch only folders whose name a save or a deletion gives. Other files may be the user's.
        leftover = _LEFTOVER.match(folder.name)
        if leftover is None:
            continue
        final = checkpoints / leftover.group(1)
        if leftover.group(2) == "replaced" and not os.path.lexists(final):
            with _warning_on_error(folder):
                folder.rename(final)
        else:
            _delete(folder)
    # A pin whose checkpoint is gone would pin the next one of that step.
    for marker in checkpoints.glob(f"step-*{_PIN_SUFFIX}"):
        if not os.path.lexists(marker.with_name(marker.name.removesuffix(_PIN_SUFFIX))):
            with _warning_on_error(marker):
                marker.unlink()


def _hide(folder: Path) -> Path:
    """Rename a folder that will be deleted to a hidden name, which readers ignore. Return the new path."""
    # The name of a staging folder begins with a dot already.
    hidden = _find_free_name(folder.with_name(f".{folder.name.lstrip('.')}.deleted"))
    folder.rename(hidden)
    return hidden


def _delete(folder: Path) -> None:
    with _warning_on_error(folder):
        # rmtree refuses links and files. Somebody may have made one with the name of a checkpoint.
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        else:
            shutil.rmtree(folder)


@contextmanager
def _warning_on_error(path: Path) -> Iterator[None]:
    """Return a context that prints a disk error while ``path`` is cleaned up as a warning. The run can go on without that."""
    try:
        yield
    except OSError as error:
        file = "" if error.filename is None else f"{error.filename}: "
        say(
            f"WARNING: {path}: it cannot be cleaned up ({file}{error.strerror or error}); the next start tries again.",
            file=sys.stderr,
        )


def _find_free_name(path: Path) -> Path:
    """Return ``path``, with a number added if that name is taken."""
    free_path = path
    number = 1
    while os.path.lexists(free_path):
        number += 1
        free_path = path.with_name(f"{path.name}-{number}")
    return free_path


def _set_one_aside(checkpoint: Path, kind: str) -> Path:
    """Rename a checkpoint to ``step-N.KIND``, and its pin with it. Return the new path."""
    new_path = _find_free_name(checkpoint.with_name(f"{checkpoint.name}.{kind}"))
    # Write the new pin first: if the process is killed before the rename, the checkpoint still has a pin under either name.
    pin(new_path, is_pinned(checkpoint))
    checkpoint.rename(new_path)
    pin(checkpoint, False)
    return new_path


def list_complete(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints, oldest step first. They are checked without reading tensors, see `find_damage`."""
    return [checkpoint for checkpoint in list_candidates(checkpoints) if find_damage(checkpoint) is None]


def list_candidates(checkpoints: Path) -> list[Path]:
    """Return all folders with a checkpoint's name, damaged or not, oldest step first."""
    if not checkpoints.is_dir():
        return []
    return sorted((folder for folder in checkpoints.iterdir() if _NAME.match(folder.name)), key=step_of)


def list_all(checkpoints: Path) -> list[Path]:
    """Return the folders of all checkpoints: complete, damaged, abandoned or unreadable."""
    return [*list_candidates(checkpoints), *list_aside(checkpoints, "abandoned"), *list_aside(checkpoints, "unreadable")]


def list_aside(checkpoints: Path, kind: str) -> list[Path]:
    """Return the folders that were set aside as ``kind``: ``abandoned`` or ``unreadable``."""
    if not checkpoints.is_dir():
        return []
    folders = []
    for folder in sorted(checkpoints.iterdir()):
        match = _NAME_ASIDE.match(folder.name)
        if match is not None and match.group(2) == kind:
            folders.append(folder)
    return folders


def find_damage(checkpoint: Path, *, thorough: bool = False, tell: Callable[[int], Any] = lambda count: None) -> str | None:
    """Return why a folder is not a complete checkpoint, or None if it is one.

    The sizes of all files are compared with the manifest, and the digests of JSON files: these are small, and the values in
    them (the batch size, the losses) are used even if nobody has made a thorough check.

    Args:
        thorough: compare the digests of all files, which reads every byte.
        tell: called with the number of bytes of every block read.
    """
    try:
        return _examine(checkpoint, thorough, tell)
    except OSError as error:
        return f"{error.filename or checkpoint}: it cannot be read: {error.strerror or error}"


def _examine(checkpoint: Path, thorough: bool, tell: Callable[[int], Any]) -> str | None:
    """Return what `find_damage` returns. Raise an `OSError` if the disk fails."""
    if checkpoint.is_symlink():
        return f"{checkpoint}: it is a symbolic link; its target may change or belong to another run"

    # The manifest.
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    try:
        manifest = reading.read_json(checkpoint / MANIFEST)
        version = manifest["format_version"]
        step = manifest["step"]
        for name, facts in manifest["files"].items():
            sizes[name] = facts["bytes"]
            digests[name] = facts["xxh3_128"]
        # If the version is not a number, this raises a TypeError.
        is_newer = version > FORMAT_VERSION
    except (FileNotFoundError, NotADirectoryError):
        return f"{checkpoint}: there is no {MANIFEST}; the save was not finished, or this is not a checkpoint"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{checkpoint / MANIFEST}: cannot be read: {type(error).__name__}: {error}"
    if version not in _READABLE_VERSIONS:
        age = "newer" if is_newer else "older"
        readable = " and ".join(map(str, _READABLE_VERSIONS))
        return (
            f"{checkpoint}: format {version} is {age} than this version reads ({readable}); use the "
            "version of Zerobook that wrote it"
        )
    if step_before_suffix(checkpoint) not in (None, step):
        return f"{checkpoint / MANIFEST}: it is the manifest of step {step}"

    # The files, and their sizes.
    for name, expected_size in sizes.items():
        file = checkpoint / name
        if Path(name).name != name or file.is_symlink():
            return f"{file}: its path leads out of the checkpoint's folder"
        if not file.is_file():
            return f"{file}: missing, the manifest says {expected_size} bytes"
        size = file.stat().st_size
        if size != expected_size:
            return f"{file}: {size} bytes, the manifest says {expected_size} bytes"
    unlisted = [name for name in _REQUIRED_FILES if name not in sizes]
    if unlisted:
        return f"{checkpoint / MANIFEST}: it does not list {', '.join(unlisted)}; these may belong to another checkpoint"

    # The content.
    for name, expected_digest in digests.items():
        if not thorough and not name.endswith(".json"):
            continue
        digest = reading.file_digest(checkpoint / name, tell)
        if digest != expected_digest:
            return f"{checkpoint / name}: its content is damaged: digest {digest}, the manifest says {expected_digest}"
    return None


def bytes_of(checkpoint: Path) -> int:
    """Return the size of a checkpoint: the bytes of all files in its manifest."""
    return sum(facts["bytes"] for facts in read_json(checkpoint / MANIFEST)["files"].values())


def list_unreadable(checkpoints: Path) -> dict[Path, str]:
    """Return checkpoint -> reason for the checkpoints that cannot be read, also those set aside. No tensors are read."""
    reasons: dict[Path, str] = {}
    for checkpoint in list_candidates(checkpoints):
        problem = find_damage(checkpoint)
        if problem is not None:
            reasons[checkpoint] = problem
    return reasons | list_set_aside_unreadable(checkpoints)


def list_set_aside_unreadable(checkpoints: Path) -> dict[Path, str]:
    """Return checkpoint -> reason for the checkpoints that were set aside because they could not be read."""
    reasons: dict[Path, str] = {}
    for checkpoint in list_aside(checkpoints, "unreadable"):
        # No damage is found here if it is in the tensors, or if somebody has repaired it.
        default = "it was set aside because it could not be read; --resume_from_checkpoint with its path tries it again"
        reasons[checkpoint] = find_damage(checkpoint) or f"{checkpoint}: {default}"
    return reasons


def eval_loss(checkpoint: Path) -> float | None:
    """Return the held-out loss at a checkpoint's step; None if it was not evaluated there, or is not finite."""
    loss = _read_progress_value(checkpoint, "eval_loss")
    # Earlier versions may have recorded a NaN.
    return loss if isinstance(loss, float | int) and math.isfinite(loss) else None


def held_out_fingerprint(checkpoint: Path) -> str:
    """Return the fingerprint of the data that a checkpoint's held-out loss was measured on; empty if it is not recorded."""
    return str(_read_progress_value(checkpoint, "held_out_fingerprint") or "")


def _read_progress_value(checkpoint: Path, key: str) -> Any:
    """Return a value of a checkpoint's progress.json; None if it cannot be read."""
    try:
        return reading.read_json(checkpoint / PROGRESS)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sort_by_loss(checkpoints: list[Path]) -> list[Path]:
    """Return the evaluated ones of ``checkpoints``, sorted by held-out loss with the lowest loss last.

    Losses on different held-out data cannot be compared. So only checkpoints with the held-out data of the newest evaluated
    checkpoint are returned.

    Args:
        checkpoints: oldest first.
    """
    losses: dict[Path, float] = {}
    for checkpoint in checkpoints:
        loss = eval_loss(checkpoint)
        if loss is not None:
            losses[checkpoint] = loss
    # The newest of them that can be read.
    newest = next((checkpoint for checkpoint in reversed(losses) if find_damage(checkpoint) is None), None)
    comparable = list(losses)
    if newest is not None:
        fingerprint = held_out_fingerprint(newest)
        comparable = [checkpoint for checkpoint in losses if held_out_fingerprint(checkpoint) == fingerprint]
    return sorted(comparable, key=lambda checkpoint: losses[checkpoint], reverse=True)


def find_best(checkpoints: Path) -> Path | None:
    """Return the complete checkpoint with the lowest held-out loss, see `sort_by_loss`; None if none was evaluated."""
    by_loss = sort_by_loss(list_complete(checkpoints))
    return by_loss[-1] if by_loss else None


def set_aside(checkpoints: Path, step: int, unreadable: Collection[Path] = ()) -> list[Path]:
    """Set aside the checkpoints that are later than ``step``, from which the run resumes. Return their new paths.

    They belong to a branch that was abandoned: ``auto`` must not take them, and `prune` must not keep them instead of new
    ones. Complete ones become ``step-N.abandoned``, and a run can still resume from the path of one. Those that cannot be read
    become ``step-N.unreadable``.

    Args:
        unreadable: checkpoints whose tensors are known to be damaged. Tensors are not read here.
    """
    later = [checkpoint for checkpoint in list_candidates(checkpoints) if step_of(checkpoint) > step]
    new_paths = []
    # Newest first: if the process is killed in between, ``auto`` takes the checkpoint that is nearest to ``step``.
    for checkpoint in reversed(later):
        is_readable = checkpoint not in unreadable and find_damage(checkpoint) is None
        new_paths.append(_set_one_aside(checkpoint, "abandoned" if is_readable else "unreadable"))
    return new_paths[::-1]


def restore_name(checkpoint: Path, step: int) -> None:
    """Restore the name and the pin of a checkpoint that was set aside, for a run that resumes from it.

    If another checkpoint has that name, it is set aside: it belongs to another branch, from which the next ``auto`` must not
    resume.
    """
    final = checkpoint.with_name(name_of(step))
    if os.path.lexists(final):
        _set_one_aside(final, "abandoned" if find_damage(final) is None else "unreadable")
    # Write the new pin first, as in `_set_one_aside`.
    pin(final, is_pinned(checkpoint))
    checkpoint.rename(final)
    pin(checkpoint, False)


def pin(checkpoint: Path, pinned: bool = True) -> None:
    """Pin a checkpoint, so that it is never pruned. With ``pinned`` False, remove the pin."""
    marker = _pin_file(checkpoint)
    if pinned:
        open(marker, "ab", opener=refuse_link).close()
    else:
        marker.unlink(missing_ok=True)


def is_pinned(checkpoint: Path) -> bool:
    return _pin_file(checkpoint).exists()


def _pin_file(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}{_PIN_SUFFIX}")


def prune(checkpoints: Path, keep: int | None, protected: Collection[int] = (), *, keep_best: bool = True) -> list[Path]:
    """Delete complete checkpoints until ``keep`` are left: abandoned ones first, then the oldest. Return the deleted ones.

    Pinned checkpoints stay in addition, and so do all that cannot be read. If one cannot be deleted, a warning is printed.

    Args:
        keep: number of checkpoints that stay; None deletes nothing.
        protected: steps of checkpoints that stay, too.
        keep_best: whether the checkpoint with the lowest held-out loss stays, too.
    """
    deleted: list[Path] = []
    if keep is None:
        return deleted
    with _warning_on_error(checkpoints):
        # In the order of deletion.
        abandoned = [checkpoint for checkpoint in list_aside(checkpoints, "abandoned") if find_damage(checkpoint) is None]
        unpinned = [checkpoint for checkpoint in (*abandoned, *list_complete(checkpoints)) if not is_pinned(checkpoint)]
        best_checkpoint = find_best(checkpoints) if keep_best else None
        for checkpoint in unpinned[:-keep]:
            # Read the pins again, since a user may pin a checkpoint while the run prunes.
            if checkpoint == best_checkpoint or step_before_suffix(checkpoint) in protected or is_pinned(checkpoint):
                continue
            with _warning_on_error(checkpoint):
                hidden = _hide(checkpoint)
                # It counts as deleted, since no run can use it now, even if its files cannot be deleted.
                deleted.append(checkpoint)
                _delete(hidden)
    return deleted


# Raises `CheckpointError` if the file cannot be read.
def read_json(file: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", reading.read_json(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error

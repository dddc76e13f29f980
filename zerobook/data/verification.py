"""Verification of prepared folders: their files still have the content that was written.

A host reads every file of a folder when a run opens it, and leaves a stamp there. It reads the files again after a day, or
when the size or a time of one of them has changed.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerobook.data.source import digest_of
from zerobook.utils.bars import tqdm
from zerobook.utils.reading import file_digest, read_json

META = "meta.json"
_META_DIGEST = "meta_xxh3_128"
# Seconds for which a stamp is valid. Until then, a host does not read unchanged files again.
_VALID_S = 24 * 60 * 60


def write_meta(folder: Path, facts: dict[str, Any]) -> None:
    """Write ``meta.json``, with a digest of itself.

    Args:
        facts: JSON; ``bytes`` and ``xxh3_128`` have the size and the digest of every other file.
    """
    # The digest is of what a reader gets. JSON has fewer types than Python, so convert the facts first.
    content = json.loads(json.dumps(facts))
    content[_META_DIGEST] = _digest_of_json(content)
    (folder / META).write_text(json.dumps(content, indent=1))


def find_damage(folder: Path, *, silent: bool = False) -> str | None:
    """Return which file of a prepared folder is damaged, and how; None for a complete folder.

    Args:
        silent: show no bar while the files are read.
    """
    meta, damage = _read_checked(folder)
    if damage is not None:
        return damage
    names = sorted(meta["bytes"])
    try:
        # Take the stats before the files are read: the stamp must not cover a change that is made while they are read.
        stats = _stats(folder, names)
        if _is_stamped(folder, stats):
            return None
        total = sum(meta["bytes"].values())
        with tqdm(total=total, desc="verifying prepared data", unit="B", unit_scale=True, leave=False, disable=silent) as bar:
            for name in names:
                digest = file_digest(folder / name, bar.update)
                expected = meta["xxh3_128"].get(name)
                if digest != expected:
                    return f"{folder / name}: its content is damaged: digest {digest}, {META} says {expected}"
    except OSError as error:
        return f"{error.filename or folder}: it cannot be read: {error.strerror or error}"
    _write_stamp(folder, stats)
    return None


def stamp(folder: Path) -> None:
    """Note that this host has just written the folder's files."""
    meta, damage = _read_checked(folder)
    if damage is None:
        with suppress(OSError):
            _write_stamp(folder, _stats(folder, sorted(meta["bytes"])))


def _read_checked(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return (content of meta.json, None), or (an empty dict, why the folder is damaged).

    Only the sizes of the other files are checked. A file that was truncated by a loss of power or a full disk would otherwise
    give shorter or empty rows without an error.
    """
    file = folder / META
    try:
        return _compare_with_meta(folder, read_json(file))
    except (OSError, ValueError) as error:
        return {}, f"{getattr(error, 'filename', None) or file}: it cannot be read: {getattr(error, 'strerror', None) or error}"


# Compare meta.json with its own digest, and the sizes of the files with meta.json. Return as `_read_checked` does.
def _compare_with_meta(folder: Path, meta: Any) -> tuple[dict[str, Any], str | None]:
    file = folder / META
    # The file holds the digest of the rest of its content.
    if not isinstance(meta, dict) or meta.pop(_META_DIGEST, None) != _digest_of_json(meta):
        return {}, f"{file}: its content is damaged: it has no digest, or another than it names"
    for name, size in meta["bytes"].items():
        path = folder / name
        # The size finds a truncated file without reading it.
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes"
            return {}, f"{path}: {state}, {META} says {size} bytes"
    return meta, None


def _digest_of_json(content: dict[str, Any]) -> str:
    return digest_of(json.dumps(content, sort_keys=True).encode())


def _stats(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """Return name -> [size, time of the last change of the content, time of the last change of the file] of each file."""
    stats = {}
    for name in names:
        stat = (folder / name).stat()
        stats[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return stats


def _stamp_path(folder: Path) -> Path:
    return folder / f"verified-{socket.gethostname()}.json"


def _is_stamped(folder: Path, stats: dict[str, list[int]]) -> bool:
    """Return whether this host has verified files with these ``stats`` within a day."""
    try:
        content = read_json(_stamp_path(folder))
        age = time.time() - content["time"]
        # The age is negative if the clock was set back. Then it is not known how old the stamp is.
        return 0 <= age < _VALID_S and content["files"] == stats
    # If a stamp cannot be read, the files are only read once more.
    except (OSError, ValueError, KeyError, TypeError):
        return False


# Note that this host has verified files with these ``stats`` now.
def _write_stamp(folder: Path, stats: dict[str, list[int]]) -> None:
    file = _stamp_path(folder)
    # Write to another name and rename, so that no process reads an incomplete stamp.
    staging = file.with_name(f".{file.name}.{os.getpid()}")
    # A folder without permission to write gets no stamp.
    with suppress(OSError):
        staging.write_text(json.dumps({"time": time.time(), "files": stats}))
        staging.replace(file)

"""File modes, and folders that get their names only when they are complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def modes_by_umask(folder: Path) -> None:
    """Give the files in ``folder`` the mode that the umask gives new files. safetensors lets only the owner read its files."""
    probe = folder / ".mode"  # the umask can only be read by changing it for a moment, in all threads
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.iterdir():
        if file.is_file() and file.stat().st_mode & 0o777 != mode:
            file.chmod(mode)


def staging_of(folder: Path) -> Path:
    """Return the path beside ``folder`` where it is written until it is complete. Deletes the remains of a killed process."""
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    return staging


def put_in_place(staging: Path, folder: Path) -> None:
    """Give a complete folder its name. An old one of that name is renamed first, and deleted when the new one is there.

    A process that is killed between the renames leaves both, hidden; the next process writes the folder again.
    """
    old = folder.with_name(f".{folder.name}.replaced")
    _remove(old)
    if os.path.lexists(folder):
        folder.rename(old)
    staging.rename(folder)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)

"""File modes."""

from __future__ import annotations

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

"""Chat templates by name, for models that have none."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("chat_templates")
NAMES = ("chatml", "falcon", "gemma", "llama-3", "mistral", "zephyr")


def template_file(name: str) -> Path:
    """Return the file of a chat template: one of `NAMES`, or a path."""
    return FOLDER / f"{name}.jinja" if name in NAMES else Path(name).expanduser()

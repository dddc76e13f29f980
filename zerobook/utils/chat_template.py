"""Chat templates that are shipped, for models that have none."""

from pathlib import Path

FOLDER = Path(__file__).with_name("chat_templates")
NAMES = ("chatml", "chatml-tools", "falcon", "gemma", "llama-3", "llama-3-tools", "mistral", "zephyr")
# The templates that render tools, the calls of tools, and their results.
READ_TOOLS = ("chatml-tools", "llama-3-tools")
# The template for chats if the tokenizer has none. It ends turns with the end-of-text token, which every model knows.
DEFAULT = "zephyr"


def template_file(name: str) -> Path:
    """Return the file of a chat template. ``name`` is one of `NAMES`, or a path."""
    if name in NAMES:
        return FOLDER / f"{name}.jinja"
    return Path(name).expanduser()

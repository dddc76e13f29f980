"""The one reader of YAML that a person wrote: recipe configs and strategy files."""

from __future__ import annotations

from typing import Any

import yaml


class _DistinctKeysLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where plain YAML silently takes the last value."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return node


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text.

    Raises:
        yaml.YAMLError: the text is no YAML, or gives a key twice. Its ``problem`` and ``problem_mark`` say what and where.
    """
    return yaml.load(text, Loader=_DistinctKeysLoader)

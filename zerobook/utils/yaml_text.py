"""Readers of YAML and JSON files that users write, such as recipe configs and strategy files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest_file
from zerobook.utils.reading import read_text

MOST_DEPTH = 64
# Maximum number of values, with the repetitions by aliases. A few nested aliases can make billions of values.
MOST_NODES = 100_000


class BoundedLoader(yaml.SafeLoader):
    """YAML loader with limits for the depth of nesting and for the number of values, including those that aliases repeat."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0
        # The number of values in each node that is complete, by the node's id().
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        # The next event tells whether this is an alias. The node does not: an alias gives the node that it repeats, itself.
        event = self.peek_event()
        mark = event.start_mark
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_DEPTH} levels are nested", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        # An alias repeats a node whose size is known already, unless the alias is inside of this node.
        if id(node) not in self._sizes:
            if isinstance(event, yaml.AliasEvent):
                raise yaml.composer.ComposerError(None, None, "an alias is inside of the value that it repeats", mark)
            self._sizes[id(node)] = self._count_values(node, mark)
        return node

    def _count_values(self, node: yaml.Node, mark: Any) -> int:
        """Return the number of values in a node: itself, and those in its children, which must be composed already."""
        children: list[yaml.Node] = []
        # A mapping has pairs of nodes: a key can be a mapping or list too.
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        size = 1 + sum(self._sizes[id(child)] for child in children)
        if size > MOST_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"it has more than {MOST_NODES} values, with those that aliases repeat", mark
            )
        return size


class _DistinctKeysLoader(BoundedLoader):
    """Refuses a key that stands twice in a mapping. PyYAML would take the last value without a warning."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value} is given twice", key.start_mark)
            keys.add(str(key.value))
        return node


class _TextLoader(_DistinctKeysLoader):
    """Returns numbers, dates and words such as ``no`` as the text in the file. Only null, true and false become values.

    YAML 1.1 takes ``1e-4`` for text, ``no`` for false, ``1:30`` for a number and ``2026-01-02`` for a date. In a recipe's YAML,
    the type of the key decides what the text means, as it does for flags.
    """

    # Resolvers give a text without quotes its type. Those of YAML 1.1 are left out, and three are added below.
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])


def load_yaml_as_text(text: str) -> Any:
    """Return the content of a recipe's YAML, with every number as its text.

    Raises:
        yaml.YAMLError: as in `load_yaml`.
    """
    return yaml.load(text, Loader=_TextLoader)


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text.

    Raises:
        yaml.YAMLError: the text is not valid YAML, gives a key twice, or exceeds the limits of `BoundedLoader`. ``problem`` of
            the error says what is wrong, and ``problem_mark`` where.
    """
    return yaml.load(text, Loader=_DistinctKeysLoader)


def load_bounded(text: str) -> Any:
    """Return the content of YAML that another program wrote, in which a key may stand twice.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or exceeds the limits of `BoundedLoader`.
    """
    return yaml.load(text, Loader=BoundedLoader)


def read_mapping(
    file: str, kind: str, parse: Callable[[str], Any], *, advice: str = "", may_be_pipe: bool = False
) -> dict[str, Any]:
    """Return the mapping in a file.

    Args:
        kind: what the file should be, for messages, such as ``recipe config``.
        parse: returns the content of a text, as `load_yaml` does.
        advice: the end of the message if the file cannot be read or holds something else.
        may_be_pipe: see `read_text`.

    Raises:
        ConfigError: the file cannot be read, or does not hold a mapping.
    """
    path = Path(file).expanduser()
    try:
        loaded = parse(read_text(path, may_be_pipe=may_be_pipe))
    except (OSError, UnicodeDecodeError) as error:
        # Only an OSError has a strerror.
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        near = "" if path.exists() else nearest_file(path)
        raise ConfigError(f"{file}: the {kind} cannot be read ({reason}).{near} {advice}".rstrip()) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Only an error of YAML has a problem and its place.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{where}: not a valid {kind}: {getattr(error, 'problem', error)}.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{file}: expected the {kind}, a mapping of keys to values, found a {type(loaded).__name__}. {advice}".rstrip()
        )
    return loaded

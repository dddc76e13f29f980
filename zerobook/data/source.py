"""The samples of one split of a dataset, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# (location, row, cost). The location is for messages. The row is a mapping, another value of a JSON array, the bytes of a JSON
# line, or `Malformed`. The cost is the amount that reading the row adds to the progress, in the unit of `Source.total`.
Item = tuple[str, Any, int]


def take_samples(items: Iterator[Item], start: int, stop: int | None) -> Iterator[Item]:
    """Yield the items of the samples from ``start`` to before ``stop``, and read nothing after them."""
    # The end is checked behind each item below, which would be too late for none.
    if stop == 0:
        return
    number = 0
    for item in items:
        if number >= start:
            yield item
        # A part of a long text counts only if it is the last part. All other samples have no attribute ``ends``, and count.
        number += getattr(item[1], "ends", True)
        if number == stop:
            return


@dataclass(frozen=True)
class Malformed:
    """A sample that could not be read. The samples after it can be read."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """One split of one dataset.

    ``read`` yields the samples, from the beginning in each call. ``digest`` returns a digest of the content; that of several
    files has a line for each. ``sketch`` returns a digest for which only a part of the content is read. ``cut`` returns parts
    of the source; it is None if the source can only be read from its beginning.
    """

    name: str
    read: Callable[[], Iterator[Item]]
    digest: Callable[[], str]
    total: int  # size, in ``unit``; 0 if it is not known
    unit: str  # "B" for bytes, or " samples"
    lone_text: bool = False  # one running text, of which the end is held out
    sketch: Callable[[], str] | None = None
    cut: Callable[[], list[Source]] | None = None
    is_held_out: bool = False  # no sample of it is trained on

    def shards(self) -> list[Source]:
        """Return the parts that a stream reads one after another; the source itself if it cannot be cut."""
        return self.cut() if self.cut else [self]


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Splits of a dataset. ``held_out`` is None if the data has no split for it.

    ``train_name`` and ``held_out_name`` are the data's own names of the splits, with the number of files in a folder; empty
    for data without splits. ``unused``: other splits, and files that are not read.
    """

    train: Source
    held_out: Source | None = None
    train_name: str = ""
    held_out_name: str = ""
    unused: tuple[str, ...] = ()

    def describe(self, *, uses_held_out: bool) -> str:
        """Return a sentence on what is trained on and what is held out; empty if there was nothing to choose.

        Args:
            uses_held_out: the held-out split is used. It is not if the user named other held-out data.
        """
        unused = list(self.unused)
        words = []
        if self.train_name:
            words.append(f"trains on {self.train_name}")
        if self.held_out_name and uses_held_out:
            words.append(f"holds out {self.held_out_name}")
        # The user named other held-out data, so this split is not used.
        elif self.held_out_name:
            unused.insert(0, self.held_out_name)
        if unused:
            words.append(f"does not use {', '.join(unused)}")
        return ", ".join(words)


def not_utf8(position: int | None) -> str:
    """Return the error message for text that is not UTF-8 from byte ``position`` on."""
    where = "" if position is None else f" from byte {position} on"
    return (
        f"not UTF-8{where}. If it is Latin-1 or Windows-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8. "
        "The encoding of other files has to be known"
    )


def digest_of(*contents: bytes) -> str:
    """Return one digest (xxh3_128) of all contents."""
    import xxhash

    digest = xxhash.xxh3_128()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()

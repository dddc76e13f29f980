"""Files that somebody wrote to do harm: each is refused by name, within bounds of time and memory."""

from __future__ import annotations

import gzip
import os
import resource
import shutil
import time
from pathlib import Path

import pytest
import yaml

from zerobook.checkpoint import store
from zerobook.data import deadline
from zerobook.data.files import file_source
from zerobook.data.sources import open_source
from zerobook.errors import ConfigError, DataError
from zerobook.launch import accelerate_file
from zerobook.runlog import jsonl, report
from zerobook.runlog.writer import RunLog
from zerobook.utils.reading import file_digest, read_json, read_text
from zerobook.utils.yaml_text import load_yaml

DEEP = "[" * 200_000 + "]" * 200_000
LAUGHS = "\n".join(["a0: &a0 [lol]"] + [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)])


# --- checkpoints, runlogs, configs
def checkpoint_with(tmp_path: Path, write) -> Path:
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    write(checkpoint / store.MANIFEST)
    return checkpoint


@pytest.mark.parametrize("write", [
    lambda file: file.write_text(DEEP), os.mkfifo, lambda file: file.mkdir(), lambda file: file.write_bytes(b"\xff\xfe"),
], ids=["nested deeply", "pipe", "folder", "no text"])  # fmt: skip
def test_a_manifest_that_cannot_be_one_is_damage_that_names_the_file(tmp_path, write):
    checkpoint = checkpoint_with(tmp_path, write)

    reason = store.damage(checkpoint)

    assert reason is not None and store.MANIFEST in reason
    assert store.complete(checkpoint.parent) == []


@pytest.mark.timeout(60)
def test_no_reader_waits_for_a_pipe(tmp_path):
    pipe = tmp_path / "events.jsonl"
    os.mkfifo(pipe)

    for read in (read_text, read_json, jsonl.read, lambda file: list(jsonl.backwards(file)), file_digest):
        with pytest.raises(OSError, match="regular"):
            read(pipe)
    with pytest.raises(ConfigError, match="regular"):
        accelerate_file.load(str(pipe))
    with pytest.raises(DataError):
        list(file_source(pipe).read())


@pytest.mark.parametrize("text", [LAUGHS, DEEP, "a: &a [*a]", "a: &a {b: *a}"], ids=["laughs", "deep", "cycle", "mapping"])
def test_yaml_has_bounds(text):
    begun = time.process_time()

    with pytest.raises(yaml.YAMLError):
        load_yaml(text)

    assert time.process_time() - begun < 20


def test_ordinary_aliases_are_read():
    assert load_yaml("base: &base {a: 1}\nboth: [*base, *base]\nmore:\n  <<: *base\n  b: 2") == {
        "base": {"a": 1}, "both": [{"a": 1}, {"a": 1}], "more": {"a": 1, "b": 2},
    }  # fmt: skip


# --- data
def test_a_folder_of_data_has_no_links_out_of_it(tmp_path):
    outside = tmp_path / "secret.jsonl"
    outside.write_text('{"text": "secret"}\n')
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").symlink_to(outside)

    with pytest.raises(DataError, match=r"train\.jsonl"):
        open_source(str(folder))

    # links within the folder, and those of the hub's cache, are as they should be
    shutil.move(outside, folder / "real.txt")
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(folder / "real.txt")
    assert len(list(open_source(str(folder)).train.read())) == 1


@pytest.mark.parametrize("rows", [1, 0], ids=["one long line", "an open quote"])
def test_a_small_compressed_table_does_not_fill_the_memory(tmp_path, rows):
    bomb = tmp_path / "train.csv.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        file.write(b"text,label\n")
        for _ in range(300):
            file.write((b"a," if rows else b'"a\n') * (1 << 19))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(DataError, match=r"train\.csv\.gz"):
        list(file_source(bomb).read())

    assert bomb.stat().st_size < 2 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"


# --- templates
def test_a_template_without_an_end_is_stopped():
    from zerobook.data.templates import _compiled

    endless = "{% for _ in range(90000) %}" * 3 + "{% endfor %}" * 3

    with pytest.raises(DataError, match="chat_template"), deadline.deadline(0.3):
        _compiled(endless).render(messages=[])


def test_what_ends_in_time_is_not_stopped():
    with deadline.deadline(0.2):
        pass
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass


# --- reports
def test_reports_show_names_of_columns_as_text(tmp_path):
    log = RunLog(tmp_path)
    evil = "<img src=x onerror=alert(1)>\x1b[31m|"
    log.event("eval", step=1, seconds=0.1, loss=1.0, perplexity=2.7, tokens=4, datasets={}, metrics={}, samples=[{evil: evil}])
    log.close()

    page, markdown = report.write(tmp_path)

    for file in (page, markdown):
        text = file.read_text()
        assert "<img" not in text and "\x1b" not in text
        assert "&lt;img" in text

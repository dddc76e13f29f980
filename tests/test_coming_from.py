"""docs/how-to/coming_from_*.md: their tables are made of the importer's, and their configs are imported as a whole."""

from __future__ import annotations

import pytest
import yaml

from scripts import coming_from
from tests.test_readme import shown_files
from zerobook.cli.main import main
from zerobook.interop.configs.importer import recognise_trainer
from zerobook.interop.configs.table import TRAINERS, UNKNOWN, load_table


def read_page(trainer):
    return (coming_from.FOLDER / f"coming_from_{trainer}.md").read_text()


@pytest.mark.parametrize("trainer", coming_from.PAGES)
def test_the_tables_are_made_of_the_importers(trainer):
    page = read_page(trainer)
    assert coming_from.BEGIN in page and coming_from.replaced(page, trainer) == page, "run scripts/coming_from.py"


@pytest.mark.parametrize("trainer", coming_from.PAGES)
def test_examples_have_keys_that_the_importer_knows(trainer):
    for example in coming_from.examples(trainer):
        assert example.keys() <= load_table(TRAINERS[trainer]).entries.keys()
        assert UNKNOWN not in {line.kind for line in coming_from.lines_of(trainer, example)}


@pytest.mark.parametrize("trainer", coming_from.PAGES)
def test_the_config_of_the_page_is_imported_without_a_key_left_out(trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = shown_files(read_page(trainer))
    (name,) = [name for name in files if name.endswith(".yaml")]
    (tmp_path / name).write_text(files[name])
    exec(files["make_sums.py"], {})

    # The trainer is recognised, and the exit code says that each key has a counterpart.
    assert main(["import", "config", name]) == 0

    assert recognise_trainer(yaml.safe_load(files[name]), name) == trainer
    values = yaml.safe_load((tmp_path / f"{name.removesuffix('.yaml')}_imported" / "recipe.yaml").read_text())
    assert values["adapter"] == "lora" and values["warmup_from_zero"]
    assert values["dataset_name"].startswith(str(tmp_path))

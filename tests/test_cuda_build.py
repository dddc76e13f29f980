"""scripts/cuda_build.py names what failed, and docs/measured/gpu.md has the section that it writes."""

from __future__ import annotations

import pytest
import torch

from scripts import cuda_build


def test_cases_with_an_error_are_failed():
    record = {"parts": {"tests": {"a": {"summary": "1 skipped"}, "b": {"error": "stopped"}}, "speed": {"c": {"seconds": 1}}}}
    assert cuda_build.failed_cases(record) == ["tests: b"]


def test_the_page_has_one_place_for_the_section():
    page = cuda_build.PAGE.read_text()
    replaced = cuda_build.replace_section(page, "new words")
    assert "new words" in replaced and cuda_build.replace_section(replaced, "others").count("new words") == 0
    with pytest.raises(ValueError, match="0 times"):
        cuda_build.replace_section("no marks", "new words")


def test_a_build_for_cpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cuda_build, "import_modules", lambda name: pytest.fail("it went on"))
    with pytest.raises(SystemExit, match="not built for CUDA"):
        cuda_build.main()


def test_the_section_names_versions_and_parts(monkeypatch):
    monkeypatch.setattr(cuda_build, "version", lambda name: "1.2.3")
    section = cuda_build.describe(200, {"parts": {"machine": {}, "speed": {}}})
    assert torch.__version__ in section and "accelerate 1.2.3" in section and "machine, speed" in section

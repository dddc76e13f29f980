"""Puts the recipes and the strategy files into the package of a wheel. Everything else stands in pyproject.toml.

They lie at the root of a clone, where users type their paths. A top-level package ``recipes`` would collide with that of
other projects, and package data cannot come from outside of a package.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SHIPPED = ("accelerate_configs/**/*.yaml", "ds_configs/**/*.json")


class BuildWithStrategyFiles(build_py):
    """Copies the strategy files into ``zerobook/_shipped``, where `zerobook.utils.shipped` finds them."""

    def run(self) -> None:
        super().run()
        for target, source in self._shipped().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target, preserve_mode=False)

    def get_source_files(self) -> list[str]:
        # The package's own file is not among the recipes, where setuptools looks for it.
        return [*super().get_source_files(), *self._shipped().values(), "zerobook/recipes/__init__.py"]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._shipped()]

    def get_output_mapping(self) -> dict[str, str]:
        return super().get_output_mapping() | self._shipped()

    def _shipped(self) -> dict[str, str]:
        """Target -> source, both relative to the root, as setuptools names files."""
        sources = [file.as_posix() for pattern in SHIPPED for file in sorted(Path().glob(pattern))]
        return {str(Path(self.build_lib, "zerobook", "_shipped", source)): source for source in sources}


setup(
    packages=[*find_packages(include=["zerobook*"], exclude=["zerobook.recipes"]), "zerobook.recipes"],
    package_dir={"zerobook.recipes": "recipes"},
    cmdclass={"build_py": BuildWithStrategyFiles},
)

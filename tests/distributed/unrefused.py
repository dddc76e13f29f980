"""Runs a recipe with a base or a model that its strategy cannot train, as if it could: what is refused must still fail.

accelerate launch ... tests/distributed/unrefused.py recipes/NAME.py [flags]
"""

import runpy
import sys

import zerobook.launch.resolve
import zerobook.models.load
import zerobook.models.quantise


def main():
    for module in (zerobook.launch.resolve, zerobook.models.quantise):
        module.explain_refused_base = lambda *arguments: None
    for module in (zerobook.launch.resolve, zerobook.models.load):
        module.find_zero3_problems = lambda *arguments: []
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

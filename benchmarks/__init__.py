"""Measurements. A package, because PyArrow 17 installs another one of this name, which a folder alone would not come before."""

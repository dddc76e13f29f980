"""Zerobook: training recipes on Accelerate that plan, survive and log themselves."""

__version__ = "0.1.0"

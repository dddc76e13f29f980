"""Checkpoints that any strategy writes and any strategy continues."""

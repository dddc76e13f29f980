"""Imports and exports of other trainers' configs and checkpoints."""

"""The record of a run: append-only events and steps, and the commands that read them."""

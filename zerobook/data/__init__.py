"""Data: from a dataset's name to the micro-batches of every step, the same on any number of ranks."""

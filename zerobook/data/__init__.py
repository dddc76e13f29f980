"""From a dataset's name to the micro-batches of every optimizer step, the same under any split."""

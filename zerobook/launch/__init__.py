"""The launch: from the environment of a process to an Accelerator and its strategy."""

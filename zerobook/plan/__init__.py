"""The planner: memory, traffic and time of a run under every strategy file, before it starts."""

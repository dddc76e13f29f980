"""Health of a run's processes: where each of them is, and which of them stopped.

`position` holds the phase of this process. `watch` publishes it in a heartbeat and reads what is said about the others; `judge`
decides from all heartbeats which rank blocks the run.
"""

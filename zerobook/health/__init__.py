"""Health of a run's processes: in which phase each of them is, and which of them has stopped.

`position` has the phase of this process. `watch` sends it to rank 0 in heartbeats. On rank 0, `judge` decides from all
heartbeats which rank blocks the run, and `watch` then ends every process.
"""

"""The run's logbook: append-only events, and the series of its steps."""

"""Published comparisons, run again on this hardware and shown beside the printed figures."""

"""Published comparisons, run again on the hardware at hand and set beside what was printed."""

"""The spike monitor: detector, recovery policy and warning signals."""

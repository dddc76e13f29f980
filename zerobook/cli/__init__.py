"""The commands of ``zerobook``, one file each, and the only place with argparse."""

"""Special numbers that several folders share. This module imports nothing."""

# Label of a token that the loss does not count, as in ``torch.nn.functional.cross_entropy`` and transformers.
IGNORE = -100
# The learning rate at which ``polynomial`` ends: transformers' default. transformers refuses a peak that is not above it.
POLYNOMIAL_END = 1e-7
# Row number of a row that fills up the last batch. Its tokens are real, and none of them is supervised, so its loss is 0.
FILLER = -1
# Exit code of a run that stopped for a person to decide. The same launch again would meet the same spike.
STOPPED = 76

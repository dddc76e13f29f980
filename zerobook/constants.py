"""Special numbers, shared by data, loss and evaluation. This module imports nothing."""

IGNORE = -100
"""Label of a token that the loss does not count, as in ``torch.nn.functional.cross_entropy`` and transformers."""
POLYNOMIAL_END = 1e-7
"""The learning rate at which ``polynomial`` ends: transformers' default. transformers refuses a peak that is not above it."""
FILLER = -1
"""Row number of a row that fills up the last batch. Its tokens are real, and none of them is supervised, so its loss is 0."""

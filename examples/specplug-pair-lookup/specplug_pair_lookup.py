"""A whole proposer in a dozen lines."""

import numpy as np

from specplug import proposer


@proposer()
def pair_lookup(tokens, max_tokens):
    """Continues as the text went on after the last two tokens occurred before."""
    if len(tokens) < 3:
        return []
    starts = np.flatnonzero((tokens[:-2] == tokens[-2]) & (tokens[1:-1] == tokens[-1]))
    if not len(starts):
        return []
    follows = starts[-1] + 2
    return tokens[follows : follows + max_tokens]

"""The outer steps of DiLoCo and SparseLoCo, slow and plain: loops over rounds and ranks.

What a rank gives in a round is a numpy row; the answers are what the weights move by. Nothing is imported
from the library.
"""

import numpy as np

from .codecs import chunk_topk_decoded, f32


def diloco(rounds, lr, momentum):
    """Douillard et al., 2023: the mean of all ranks goes into a momentum that all of them share."""
    velocity, answers = np.zeros(len(rounds[0][0])), []
    for rows in rounds:
        delta = sum(np.float64(row) for row in rows) / len(rows)
        velocity = momentum * velocity + delta
        answers.append(lr * (delta + momentum * velocity))
    return answers


def sparseloco(rounds, lr, decay, ratio, value="int2"):
    """Sarfi et al., 2025: each rank's residual decays, takes the new row, and sends its largest elements.
    Then plain SGD with the mean over *all* ranks, also those that have sent nothing of an element.
    """
    residuals, answers = [np.zeros(len(row), f32) for row in rounds[0]], []
    for rows in rounds:
        total = np.zeros(len(rows[0]))
        for rank, row in enumerate(rows):
            whole = f32(decay) * residuals[rank] + row  # in fp32: the largest must be the same ones
            sent = chunk_topk_decoded(whole, ratio, value)
            residuals[rank] = whole - sent
            total += sent
        answers.append(lr * total / len(rows))
    return answers

"""The outer step of DiLoCo, slow and plain: loops over rounds and ranks, in fp64.

What a rank gives in a round is a numpy row; the answers are what the weights move by. Nothing is imported
from the library.
"""

import numpy as np


def diloco(rounds, lr, momentum):
    """Douillard et al., 2023: the mean of all ranks goes into a momentum that all of them share."""
    velocity, answers = np.zeros(len(rounds[0][0])), []
    for rows in rounds:
        delta = sum(np.float64(row) for row in rows) / len(rows)
        velocity = momentum * velocity + delta
        answers.append(lr * (delta + momentum * velocity))
    return answers

"""Shared by all tests. Ranks are forked from this process, so it stays single-threaded."""

import torch

torch.set_num_threads(1)

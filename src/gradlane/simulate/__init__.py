"""The same strategies without a network: n ranks in one process, or no numbers at all."""

"""Every built-in strategy is an expression of a few small parts."""

"""``Auto``: the strategy that pays on this link, chosen while training runs."""

"""How keys and values are kept and attended to."""

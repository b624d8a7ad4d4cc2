"""`Model`, the handle people hold: its methods by theme, over the models behind it."""

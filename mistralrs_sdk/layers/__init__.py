"""The layers models are put together from."""

"""The engine: token ids in, token ids out; synchronous, without text or event loops."""

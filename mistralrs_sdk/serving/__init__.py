"""One model on its engine: from what is asked to what the engine runs, and back to answers."""

"""From what an engine computes to what people read: streams, responses, logits."""

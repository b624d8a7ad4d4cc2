"""From a name to weights in memory: hub, safetensors, GGUF."""

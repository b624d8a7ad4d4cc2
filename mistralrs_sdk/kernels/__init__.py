"""Native CPU kernels, compiled at first use, and their pure-torch references."""

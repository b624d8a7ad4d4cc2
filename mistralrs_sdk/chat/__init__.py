"""Text on one side, token ids on the other: messages, templates, detokenising, responses."""

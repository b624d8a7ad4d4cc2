"""What an answer must match, and how its tokens are held to that."""

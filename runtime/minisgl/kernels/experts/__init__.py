"""Selection of experts, and their feed-forward."""

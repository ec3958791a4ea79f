"""Generated checkpoints: tiny ones for tests, dummies without weights, and a demo model that answers questions."""

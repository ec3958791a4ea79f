"""Generated checkpoints: tiny ones for tests, dummies without weights, a demo model that answers questions, and an
agent model that thinks and calls tools."""

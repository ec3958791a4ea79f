"""JSON schemas: what of them can be enforced exactly, as schemas that llguidance enforces exactly."""

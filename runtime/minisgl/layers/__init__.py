"""The parts a model is made of. Importing this package does not import torch."""

"""Weights of linear layers and experts: how a checkpoint stores them, how they stay in memory, and their products."""

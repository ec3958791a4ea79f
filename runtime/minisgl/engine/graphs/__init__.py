"""CUDA graphs: sizes of captured steps, capture, and the graphs of steps and of their sampling."""

"""Generated answers taken apart: reasoning, text and tool calls, in the formats of the models."""

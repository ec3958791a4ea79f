"""Text to token ids and back: chat templates, encoding, incremental decoding, stop strings. Imports no HTTP code."""

"""The /generate endpoint in SGLang's format."""

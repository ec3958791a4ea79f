"""POST /generate, SGLang's native API."""

"""Embeddings, scores of pairs and classes of texts: the APIs of OpenAI, vLLM, Cohere, Jina and TEI for them."""

"""Panics of libraries in Rust."""


class Panic(BaseException):
    """Stands in for pyo3's PanicException, which is no Exception either."""

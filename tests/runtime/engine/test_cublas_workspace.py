"""Environment variables of cuBLAS."""

from __future__ import annotations

from minisgl.engine.engine import multiply_without_workspace


def test_products_need_no_workspace() -> None:
    environment = {"HOME": "/"}
    multiply_without_workspace(environment)
    assert environment == {"HOME": "/", "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def test_a_size_of_the_user_stays() -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    multiply_without_workspace(environment)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

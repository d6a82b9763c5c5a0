"""DeepGEMM's products, compiled for Hopper where its headers and nvcc are, as their first call on a GPU would."""

from __future__ import annotations

import pytest

from support import compile_deep_gemm


@pytest.mark.slow
@pytest.mark.skipif(compile_deep_gemm.why_not() is not None, reason=str(compile_deep_gemm.why_not()))
def test_the_products_of_v3_compile_without_spills():
    found = list(compile_deep_gemm.compiled())
    assert len(found) == len(compile_deep_gemm.PRODUCTS)
    for product in found:
        assert product["spilled_bytes"] == 0, product
        assert 64 < product["registers"] <= 255, product


def test_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_deep_gemm, "nvcc", lambda: None)
    assert compile_deep_gemm.why_not() == "no nvcc here"
    monkeypatch.setattr(compile_deep_gemm, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(compile_deep_gemm, "wheel", lambda: None)
    monkeypatch.setattr(compile_deep_gemm.importlib.util, "find_spec", lambda name: None)
    assert "tests/gpu/pack.sh fetches its wheel" in compile_deep_gemm.why_not()

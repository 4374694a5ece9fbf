"""Residual activation compensation: what it changes, what it must not change."""

from __future__ import annotations

import pytest
import torch

from megatron_quads.kernels.nvfp4 import reference as nvfp4
from megatron_quads.kernels.rac import reference as rac


def activations(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(37, 128, generator=torch.Generator().manual_seed(5)) ** 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_selected_blocks_change(dtype: torch.dtype) -> None:
    x = activations(dtype)
    scale = nvfp4.row_scale(x)
    plain = nvfp4.qdq(x, scale)
    blocks = torch.tensor([6, 1, 3])
    out = rac.qdq_with_residual(x, scale, blocks)
    mask = rac.block_mask(blocks, 128)
    assert mask.sum() == 48 and out.dtype == dtype
    assert torch.equal(out[:, ~mask], plain[:, ~mask])
    error, before = (out - x).float()[:, mask].norm(), (plain - x).float()[:, mask].norm()
    assert error < before / 4
    # the order in which the blocks are listed does not matter
    assert torch.equal(rac.qdq_with_residual(x, scale, torch.tensor([1, 3, 6])), out)


def test_off_when_nothing_is_selected() -> None:
    x = activations()
    scale = nvfp4.row_scale(x)
    for none in (None, torch.empty(0, dtype=torch.int64)):
        assert torch.equal(rac.qdq_with_residual(x, scale, none), nvfp4.qdq(x, scale))


def test_all_blocks_is_two_passes() -> None:
    x = activations()
    scale = nvfp4.row_scale(x)
    first = nvfp4.qdq(x, scale)
    out = rac.qdq_with_residual(x, scale, torch.arange(8))
    assert torch.equal(out, first + nvfp4.qdq(x - first, scale))
    relative = ((out - x).norm() / x.norm()).item()
    assert relative < 0.02 < ((first - x).norm() / x.norm()).item()


def test_zero_rows_and_no_tokens() -> None:
    x = activations()
    x[4] = 0
    out = rac.qdq_with_residual(x, nvfp4.row_scale(x), torch.arange(4))
    assert not out[4].any() and out.isfinite().all()
    empty = torch.empty(0, 128)
    assert rac.qdq_with_residual(empty, torch.empty(0, 1), torch.arange(4)).shape == (0, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [[], [0, 1, 2], [7, 2, 5], list(range(8))], ids=str)
def test_packed_form_holds_the_same_values(blocks: list[int], dtype: torch.dtype) -> None:
    """[Q(x) | Q(r_S)] of the K-augmented GEMM dequantises to the two terms of qdq_with_residual."""
    x = activations(dtype)
    selected = torch.tensor(blocks, dtype=torch.int64)
    q = rac.quantize_with_residual(x, None, selected)
    assert q.codes.shape == (37, 64 + 8 * len(blocks)) and q.block_scales.shape == (37, 8 + len(blocks))
    assert torch.equal(q.scale, nvfp4.row_scale(x).squeeze(-1))
    wide = nvfp4.dequantize(q.codes, q.block_scales, q.scale[:, None])
    values, rest = wide[:, :128], wide[:, 128:]
    columns = (selected[:, None] * 16 + torch.arange(16)).flatten()
    values[:, columns] += rest
    assert torch.equal(values.to(dtype), rac.qdq_with_residual(x, q.scale[:, None], selected))


def test_silu_and_mul_variant_is_the_two_steps() -> None:
    h = activations(torch.bfloat16)
    y = rac.silu_and_mul(h)
    assert torch.equal(y, torch.nn.functional.silu(h[:, :64]) * h[:, 64:])
    selected = torch.tensor([0, 1])
    q, p = rac.quantize_with_residual(h, None, selected, silu=True), rac.quantize_with_residual(y, None, selected)
    assert torch.equal(q.codes, p.codes) and torch.equal(q.scale, p.scale)


def test_grouped_gemm_is_the_dense_product_of_each_expert() -> None:
    torch.manual_seed(0)
    experts, n, k = 3, 48, 128
    x, w = activations(torch.bfloat16), torch.randn(experts, n, k)
    offsets = torch.tensor([0, 20, 20, 37])  # the second expert has no tokens
    scales = torch.stack([nvfp4.tensor_scale(nvfp4.amax(w[e])) for e in range(experts)])
    codes, s8 = nvfp4.quantize(w, scales[:, None, None])
    blocks = torch.tensor([5, 0])
    q = rac.quantize_with_residual(x, None, blocks)
    out = rac.grouped_gemm(q, codes, s8, scales, offsets, blocks, dtype=torch.float32)
    wide = rac.qdq_with_residual(x.float(), q.scale[:, None], blocks)
    for e in range(experts):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        expected = wide[rows].double() @ nvfp4.qdq(w[e], scales[e]).double().T
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-4)

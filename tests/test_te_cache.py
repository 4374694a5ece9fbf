"""DQ(Q(W)) of a group: when it is computed, what it is, and what is refused. Plain torch."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from megatron_quads.errors import QuadsError
from megatron_quads.kernels.nvfp4 import reference as nvfp4
from megatron_quads.te.cache import WeightGroup, clock
from megatron_quads.te.install import ModuleWeights
from megatron_quads.te.scratch import Scratch, write_again
from megatron_quads.te.substitute import substitute


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    gen = torch.Generator().manual_seed(3)
    shapes = [(32, 64), (32, 64), (16, 48)]
    return [torch.nn.Parameter((torch.randn(s, generator=gen) * 0.1 * 3**i).to(dtype)) for i, s in enumerate(shapes)]


def group(params: list[torch.nn.Parameter], **options: object) -> WeightGroup:
    return WeightGroup(params, [f"w{i}" for i in range(len(params))], **options)  # type: ignore[arg-type]


def expected(params: list[torch.nn.Parameter]) -> list[Tensor]:
    return [nvfp4.qdq(p.detach(), nvfp4.tensor_scale(nvfp4.amax(p))) for p in params]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.equal(y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["copy", "packed", "transient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_computed_once_until_a_weight_changes(mode: str, dtype: torch.dtype) -> None:
    params = weights(dtype)
    g = group(params, mode=mode)
    optimizer = torch.optim.SGD(params, lr=0.05)
    for done in range(1, 4):
        for _ in range(3):
            assert equal(g.values(), expected(params))
        assert g.quantized == done
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert equal(g.values(), expected(params)) and g.quantized == 4
    with torch.no_grad():
        params[2][3, 5] = 7.0  # in place, by anybody
    assert equal(g.values(), expected(params)) and g.quantized == 5
    params[0].data = params[0].data * 2  # another storage
    assert equal(g.values(), expected(params)) and g.quantized == 6
    numbers = sum(p.numel() for p in params)
    assert g.nbytes == {"copy": numbers * dtype.itemsize, "packed": numbers * 9 // 16, "transient": 0}[mode]


@pytest.mark.parametrize("mode", ["copy", "packed"])
def test_writes_behind_torchs_back_need_a_word(mode: str) -> None:
    """A distributed optimizer writes through views of another tensor: only its step tells."""
    params = weights()
    plain, debug = group(params, mode=mode), group(params, mode=mode, debug=True)
    old = [v.clone() for v in plain.values()]
    debug.values()
    params[1].data.mul_(1.5)
    assert equal(plain.values(), old)
    with pytest.raises(QuadsError, match=r"stale .* \[w1\].*invalidate"):
        debug.values()
    plain.invalidate()
    debug.invalidate()
    assert equal(plain.values(), expected(params)) and equal(debug.values(), expected(params))
    params[1].data.mul_(1.5)
    clock.tick()
    assert equal(plain.values(), expected(params))


@pytest.mark.parametrize("mode", ["copy", "packed"])
def test_a_change_within_a_block_that_keeps_the_amax_is_stale_too(mode: str) -> None:
    params = weights()
    g = group(params, mode=mode, debug=True)
    g.values()
    params[0].data[0, 0] = params[0].data.abs().amax() / 2
    with pytest.raises(QuadsError, match=r"\[w0\]"):
        g.values()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(bad: float) -> None:
    params = weights()
    g = group(params)
    with torch.no_grad():
        params[1][2, 2] = bad
    with pytest.raises(QuadsError, match=r"NaN or Inf \[w1\]"):
        g.values()
    with torch.no_grad():
        params[1][2, 2] = 0.0
    g.values()
    params[2].data[0, 0] = bad
    clock.tick()
    g.values()  # after a step nobody waits for the host
    optimizer = torch.optim.SGD(params, lr=0.0)
    with pytest.raises(QuadsError, match=r"NaN or Inf \[w2\]"):
        optimizer.step()
    optimizer.step()


def test_a_group_that_is_gone_is_not_kept_alive_by_its_check() -> None:
    g = group(weights())
    g.values()
    clock.tick()
    g.values()
    pending = [r for r, _ in clock.unchecked]
    del g
    gc.collect()
    assert pending and pending[-1]() is None
    clock.check_finite()
    assert not clock.unchecked


def test_k_that_is_not_whole_blocks() -> None:
    with pytest.raises(QuadsError, match=r"\[8, 24\] has a K that is not a multiple of 16 \[w0\]"):
        group([torch.nn.Parameter(torch.zeros(8, 24))])


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_goes_to_the_parameter(fused: bool) -> None:
    """A layer that fuses finds main_grad, adds to it, and hands autograd a placeholder."""
    params = weights(torch.float32)
    for p in params:
        p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p), False  # type: ignore[attr-defined]
    given = substitute(params, group(params).values(), fused=fused)
    assert equal([t.detach() for t in given], expected(params)) and all(t.requires_grad for t in given)
    for t, p in zip(given, params, strict=True):
        assert (getattr(t, "main_grad", None) is p.main_grad) is fused  # type: ignore[attr-defined]
    sum((t * t).sum() * 0.5 for t in given).backward()  # type: ignore[union-attr]
    for p, value in zip(params, expected(params), strict=True):
        assert p.grad is not None and p.grad.equal(value)  # not masked, not scaled
        assert p.grad_added_to_main_grad is fused  # type: ignore[attr-defined]


def test_no_graph_without_gradients() -> None:
    params = weights()
    g = group(params)
    with torch.no_grad():
        assert equal(substitute(params, g.values(), fused=True), expected(params))
    for p in params:
        p.requires_grad_(False)
    assert not any(t.requires_grad for t in substitute(params, g.values(), fused=False))


def test_a_refresh_before_the_backward_pass_is_caught() -> None:
    """The kept buffer is overwritten: autograd must not use it for the older graph."""
    params = weights(torch.float32)
    g = group(params)
    x = torch.randn(4, 64, requires_grad=True)
    y = x @ substitute(params, g.values(), fused=False)[0].T
    with torch.no_grad():
        params[0].mul_(3)
    g.values()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


class Layer(torch.nn.Module):
    """One weight of a group, as a linear layer takes it."""

    def __init__(self, g: WeightGroup, index: int) -> None:
        super().__init__()
        self.quads_weights = ModuleWeights(g, index, 1, fused=False, substituted=True)
        if g.mode != "copy":
            write_again(self, self.quads_weights)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.quads_weights.given()[0].T


@pytest.mark.parametrize("mode", ["packed", "transient"])
def test_layers_share_memory_and_get_their_values_again_for_the_backward_pass(mode: str) -> None:
    """Two layers, two micro-batches in flight: gradients are those with a copy, bit for bit; memory is one layer's."""
    found = []
    for m in ("copy", mode):
        gen = torch.Generator().manual_seed(5)
        params = [torch.nn.Parameter(torch.randn(64, 64, generator=gen)) for _ in range(3)]
        g = group(params, mode=m)
        layers = torch.nn.Sequential(*(Layer(g, i) for i in range(3)))
        Scratch.release()
        xs = [torch.randn(8, 64, generator=gen, requires_grad=True) for _ in range(2)]
        ys = [layers(x).square().mean() for x in xs]
        assert Scratch.nbytes() == (0 if m == "copy" else 64 * 64 * 4)
        for y in ys:
            y.backward()
        found.append([*(x.grad for x in xs), *(p.grad for p in params)])
        assert g.quantized == 1
    assert equal(*found) and all(t.abs().sum() > 0 for t in found[0])


def test_shared_memory_is_not_used_without_a_note() -> None:
    """A graph that kept the values themselves must not go on when others have been written there."""
    params = weights(torch.float32)
    g = group(params, mode="packed")
    x = torch.randn(4, 64, requires_grad=True)
    y = x @ substitute(params[:1], g.values(0, 1), fused=False)[0].T
    g.values(1, 1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()
    layer = Layer(g, 0)
    y = layer(x)
    with torch.no_grad():
        params[0].mul_(2)
    g.values()
    with pytest.raises(RuntimeError, match="changed inplace between"):
        y.sum().backward()


def test_a_part_of_a_group_is_looked_at_alone() -> None:
    """Each layer looks at its own weights; a change there renews the whole group, one elsewhere waits for its layer."""
    params = weights()
    g = group(params)
    g.values()
    with torch.no_grad():
        params[2].mul_(1.5)
    assert equal(g.values(0, 2), expected(params)[:2]) and g.quantized == 1
    assert equal(g.values(2, 1), expected(params)[2:]) and g.quantized == 2
    assert equal(g.values(0, 2), expected(params)[:2]) and g.quantized == 2

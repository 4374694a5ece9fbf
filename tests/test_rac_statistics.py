"""Batches and statistics: what calibration counts does not depend on how work is dealt to ranks."""

import pytest
import torch

from megatron_quads.errors import QuadsError
from megatron_quads.kernels.rac import reference as rac
from megatron_quads.rac import batches, statistics
from megatron_quads.rac.metadata import ModelShape

SHAPE = ModelShape(model_type="qwen3_moe", num_layers=2, num_experts=4, hidden_size=64, moe_intermediate_size=32)


def sequences():
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 50, (n,), generator=g).tolist() for n in [5, 9, 5, 5, 7, 9, 9, 5, 5]]


def inputs():
    """(layer, expert, gemm, x) of a run in which expert 3 of layer 1 is never reached."""
    g = torch.Generator().manual_seed(1)
    for layer in range(2):
        for expert in range(4 - layer):
            yield layer, expert, "gate_up", torch.randn(11 + expert, 64, generator=g) * (1 + layer)
            yield layer, expert, "down", torch.randn(11 + expert, 32, generator=g) * torch.rand(32, generator=g) ** 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dealt_batches_cover_every_sequence_once(size):
    every = batches.make_batches(sequences(), max_tokens=10)
    dealt = [batches.deal(every, rank, size) for rank in range(size)]
    weight = dict.fromkeys(range(9), 0.0)
    for mine in dealt:
        for batch in mine:
            for row, tokens in zip(batch.rows, batch.tokens.tolist(), strict=True):
                assert tokens == sequences()[row], "no padding, right tokens"
                weight[row] += batch.weight
    assert all(w == pytest.approx(1.0) for w in weight.values())
    shapes = [[tuple(b.tokens.shape) for b in mine] for mine in dealt]
    assert all(s == shapes[0] for s in shapes), "ranks meet in all-to-all with equal shapes"


def test_batch_shapes_do_not_depend_on_the_number_of_ranks():
    every = batches.make_batches(sequences(), max_tokens=10)
    one = {tuple(b.tokens.shape) for b in batches.deal(every, 0, 1)}
    assert one == {tuple(b.tokens.shape) for b in batches.deal(every, 0, 2)}


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "no prompts"),
        ([[1, 2], []], "empty prompt"),
        ([[1]], "one-token prompt"),
        ([[1] * 9], "longer than the context"),
        ([[1, 50]], "vocabulary"),
    ],
)
def test_bad_prompts_are_refused(prompts, text):
    with pytest.raises(QuadsError, match=text):
        batches.check_sequences(prompts, context=8, vocab_size=50, what="prompt")


def test_moments_are_means_per_expert_and_the_layers_where_unseen():
    moments = statistics.Moments(SHAPE)
    for each in inputs():
        moments(*each)
    moments.reduce()
    assert moments.unseen([0, 1]) == [(1, 3)]
    seen = {(layer, e): x.double() for layer, e, gemm, x in inputs() if gemm == "down"}
    found = moments.second_moment(1)
    for expert in range(3):
        torch.testing.assert_close(found[expert], seen[1, expert].square().mean(0))
    torch.testing.assert_close(found[3], torch.cat([seen[1, e] for e in range(3)]).square().mean(0))
    assert moments.unit_amax([0])[0, "down"] == max(float(seen[0, e].abs().max()) for e in range(4))


def test_replicated_batches_count_once():
    once, twice = statistics.Moments(SHAPE), statistics.Moments(SHAPE)
    energy, energy2 = (statistics.ResidualEnergy(SHAPE, "token", {}) for _ in range(2))
    twice.weight = energy2.weight = 0.5
    for each in inputs():
        for s in (once, energy, twice, twice, energy2, energy2):
            s(*each)
    assert torch.equal(once.tokens, twice.tokens)
    torch.testing.assert_close(once.down_square, twice.down_square, rtol=1e-12, atol=0)
    for gemm, found in energy.energy.items():
        torch.testing.assert_close(found, energy2.energy[gemm], rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", ["token", "tensor", "static"])
def test_residual_energy_is_what_the_contract_leaves_over(mode):
    energy = statistics.ResidualEnergy(SHAPE, mode, {(0, "down"): 0.5})
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    energy(0, 1, "down", x)
    scale = statistics.activation_scale(x, mode, 0.5)
    assert scale.shape == ((20, 1) if mode == "token" else ())
    rest = rac.residual(x, scale)[1]
    expected = torch.stack([rest[:, :16].double().square().sum(), rest[:, 16:].double().square().sum()])
    torch.testing.assert_close(energy.by_unit([0])[0, "down"], expected)
    assert energy.clipped["down"][0] == ((x.abs() > 0.5).sum() if mode == "static" else 0)


def test_saturation_counts_only_what_a_static_scale_clips():
    x = torch.tensor([[1.0, -2.0, 2.5, 0.0]])
    assert statistics.saturated(x, 2.0) == 1
    assert statistics.saturated(x, 3.0) == 0

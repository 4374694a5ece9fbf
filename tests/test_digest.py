"""The digest by which weights are compared: sensitive to every bit and place, the same on every device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_quads.digest import Digests, differing_bits, tensor_digest

MASK = 2**64 - 1


def _reference(data: bytes) -> str:
    """The definition in Python's integers."""

    def odd(at: int) -> int:
        def shift(z: int, n: int) -> int:
            return ((z - 2**64 if z >> 63 else z) >> n) & MASK

        z = (at + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ shift(z, 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ shift(z, 27)) * 0x94D049BB133111EB & MASK
        return (z ^ shift(z, 31)) | 1

    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    sums = []
    for k in range(2):
        total = 0
        for i, w in enumerate(words):
            row = odd(i // 1024)
            row = odd(row) if k else row
            total += row * odd(k * 1024 + i % 1024 + (1 << 40)) * w
        sums.append(f"{total & MASK:016x}")
    return f"w1:{len(data):x}:{''.join(sums)}"


@pytest.mark.parametrize("size", [0, 1, 3, 4, 4092, 4096, 4097, 9001])
def test_it_is_what_its_definition_says(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert tensor_digest(data) == _reference(data.numpy().tobytes())


def test_every_bit_counts() -> None:
    data = torch.randint(0, 256, (4100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {tensor_digest(data)}
    for byte in (0, 1, 2, 3, 4, 2047, 4095, 4096, 4099):
        for bit in range(8):
            changed = data.clone()
            changed[byte] ^= 1 << bit
            seen.add(tensor_digest(changed))
    assert len(seen) == 1 + 9 * 8


def test_places_count() -> None:
    """Exchanged words, rows and blocks, and changes that leave row and column sums alone."""
    words = torch.randint(-(2**31), 2**31 - 1, (8, 1024), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    variants = [words]
    for a, b in (((0, 0), (0, 1)), ((0, 5), (1, 5)), ((2, 7), (6, 900))):
        changed = words.clone()
        changed[a], changed[b] = words[b], words[a]
        variants.append(changed)
    variants += [words.flip(0), words.flip(1), words.roll(1, 1), words.roll(1, 0)]
    square = words.clone()
    square[0, 0] += 1
    square[0, 1] -= 1
    square[1, 0] -= 1
    square[1, 1] += 1
    signs = words.clone()
    signs[3] ^= -(2**31)
    assert len({tensor_digest(v) for v in (*variants, square, signs)}) == len(variants) + 2


def test_length_counts_and_shape_dtype_and_strides_do_not() -> None:
    x = torch.randn(64, 48).bfloat16()
    assert tensor_digest(x) == tensor_digest(x.view(-1)) == tensor_digest(x.view(torch.int16))
    assert tensor_digest(x) == tensor_digest(x.T.contiguous().T)
    assert tensor_digest(x[:, 1:].contiguous()) == tensor_digest(x[:, 1:])
    assert tensor_digest(torch.zeros(8)) != tensor_digest(torch.zeros(9))
    flat = torch.arange(4097 * 2, dtype=torch.uint8)
    assert tensor_digest(flat[1:4097]) == tensor_digest(flat[1:4097].clone())  # a view that no word is aligned with


def test_several_at_once_are_each_their_own() -> None:
    tensors = {f"w{i}": torch.randn(i + 1, 33) for i in range(5)}
    all_of_them = Digests()
    for name, tensor in tensors.items():
        all_of_them.add(name, tensor)
        tensor_copy = tensor.clone()
        tensor.zero_()  # may change as soon as it was added
        tensors[name] = tensor_copy
    assert all_of_them.finish() == {n: tensor_digest(t) for n, t in tensors.items()}
    assert Digests().finish() == {}


INTERPRETED = """
import torch
from megatron_quads import digest
from megatron_quads.kernels.digest import add_sums
columns = digest._columns(torch.device("cpu"))
for words in (1, 5, 1024, 1025, 3 * 8192 + 77):
    data = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32)
    sums = torch.zeros(2, dtype=torch.int64)
    add_sums(data, columns, sums)
    assert digest.tensor_digest(data).endswith("".join(f"{v % 2**64:016x}" for v in sums.tolist())), words
"""


def test_the_kernel_gives_the_same_under_triton_s_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gives_the_same() -> None:
    shapes = [(768, 2048), (2048, 768), (7, 33), (1,), (3, 8192), (0,)]
    tensors = {
        str(s): torch.randn(s, generator=torch.Generator().manual_seed(i)).bfloat16() for i, s in enumerate(shapes)
    }
    tensors["unaligned"] = torch.arange(9001, dtype=torch.int32).view(torch.uint8)[2:]
    both = Digests(), Digests()
    for name, x in tensors.items():
        mine = x.cuda()
        both[0].add(name, x)
        both[1].add(name, mine)
        mine.zero_()
    assert both[0].finish() == both[1].finish()


def test_bits_that_differ_are_counted() -> None:
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    y = x.clone()
    y[0, 0], y[2, 4] = -0.0, 1.0  # 1 bit, and 0x3F80's 7
    assert differing_bits(x, x) == 0 and differing_bits(x, y) == 8 and differing_bits(x.T, y.T) == 8
    with pytest.raises(ValueError, match="not comparable"):
        differing_bits(x, x.view(-1))

"""Matrices that a quantiser must get right, and how results are compared: bit by bit."""

import torch

SHAPES = [(1, 1), (3, 7), (130, 130), (133, 192), (40, 576), (257, 128)]


def adversarial(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random values over 50 orders of magnitude, and patches of 16x64 with what breaks quantisers.

    Zeros, one value among zeros, subnormals, the largest numbers, exact powers of two and 448 times them, halves
    between two codes, values near 1e-10; NaN and infinities each in a patch of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= 10.0 ** torch.randint(-25, 25, (-(-rows // 16), -(-cols // 64)), generator=generator).repeat_interleave(
        16, 0
    ).repeat_interleave(64, 1)[:rows, :cols]
    halves = torch.arange(-64, 64).float() / 16 + 1 / 32  # between two codes of E4M3 where the scale is 1 / 64
    patches = [
        lambda p: p.zero_(), lambda p: p.zero_()[:1, :1].fill_(3e-39), lambda p: p.mul_(0).add_(1e-44),
        lambda p: p.fill_(3.3e38), lambda p: p.fill_(0.25), lambda p: p.fill_(-448.0 * 2**-30),
        lambda p: p.copy_(halves[: p.shape[1]].expand_as(p)), lambda p: p.copy_(torch.randn(p.shape) * 1e-10),
        lambda p: p[:1, -1:].fill_(torch.nan), lambda p: p[-1:, :1].fill_(torch.inf), lambda p: p.fill_(-torch.inf),
        lambda p: p.fill_(450.0), lambda p: p.fill_(2.0**-126), lambda p: p.fill_(7 * 2.0**-133),
    ]
    places = [(i, j) for i in range(0, rows, 16) for j in range(0, cols, 64)]
    order = torch.randperm(len(places), generator=generator).tolist()
    for patch, place in zip(patches, [places[i] for i in order[: max(1, len(places) // 2)]]):
        i, j = place
        patch(x[i : i + 16, j : j + 64])
    return x.to(dtype)


def same(left, right) -> bool:
    """Whether two nests of tensors agree in shape, type and every bit, but that any NaN equals any NaN of FP32."""
    if left is None or right is None:
        return left is right
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype == torch.float8_e4m3fn:
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    return torch.equal(left.nan_to_num(-1.25), right.nan_to_num(-1.25)) and torch.equal(left.isnan(), right.isnan())


def alike(left, right) -> bool:
    """Nests of tensors agree: scales exactly, codes but for one step in a thousand, FP32 values to 1e-5."""
    if left is None or right is None:
        return left is right
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(alike(a, b) for a, b in zip(left, right))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype == torch.float8_e4m3fn:
        far = (left.view(torch.uint8).int() - right.view(torch.uint8).int()).abs()
        return bool((far <= 1).all()) and int(far.sum()) <= 1 + far.numel() // 1000
    return torch.allclose(left, right, rtol=1e-5, atol=1e-5 * right.abs().mean().item() if right.numel() else 0)

"""Backends of the FP8 products: what they ask for, what they compute, and how they lay operands out for libraries.

Libraries that are not here are replaced by products written down from what their sources say of the operands; so
layouts and sums are checked, and whether a library does what its source says is not.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp8_cases import adversarial, same

from dstrain.config.errors import InputError
from dstrain.precision import e5m6, fp8_blocks, fp8_gemm, fp8_tiles
from dstrain.precision.backends import deep_gemm, requirements, torch_scaled_mm, transformer_engine, triton_kernels
from dstrain.precision.backends.emulated import Emulated
from dstrain.precision.fp8_ffn import fp8_ffn
from dstrain.precision.fp8_gemm import BACKENDS, Scaled
from dstrain.precision.fp8_linear import fp8_linear, fp8_normed_linear
from dstrain.precision.pointwise import RMSNorm

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # the largest numbers, rounded up
CPU = torch.device("cpu")
OTHERS = {"torch", "transformer_engine", "deepgemm"}


def wide(x: Scaled) -> torch.Tensor:
    """float64 values of an operand with scales by rows or blocks."""
    rows, cols = x.codes.shape[-2:]
    scale = x.scale.double().repeat_interleave(128, -1)[..., :cols]
    return x.codes.double() * (scale if scale.shape[-2] == rows else scale.repeat_interleave(128, -2)[..., :rows, :])


# What is missing ----------------------------------------------------------------------------------------------


def test_every_backend_of_the_configuration_can_be_chosen_by_its_name():
    assert set(BACKENDS) == {"emulated", "triton"} | OTHERS
    for name, (module, cls) in BACKENDS.items():
        assert getattr(__import__(module, fromlist=[cls]), cls).name == name


def test_importing_backends_imports_none_of_their_packages():
    modules = [module for module, _ in BACKENDS.values()]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n" \
        "print([m for m in ('triton', 'transformer_engine', 'deep_gemm') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_backend_that_cannot_run_here_says_in_one_line_what_it_needs(name):
    with pytest.raises(InputError) as error:
        fp8_gemm.backend(name, CPU)
    text = str(error.value)
    assert f"precision.backend={name} needs" in text and "\n" not in text
    wanted = {
        "torch": "Hopper", "transformer_engine": "transformer-engine[pytorch]>=2.12", "deepgemm": "deep_gemm>=2.1",
    }
    assert wanted[name] in text


def test_other_gpus_old_versions_and_missing_triton_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    with pytest.raises(InputError, match=r"Hopper GPU \(compute capability 9.0\); NVIDIA L40S has 8.9"):
        requirements.require_hopper("torch", torch.device("cuda"))
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda module: object())
    versions = {"triton": "3.9.0", "transformer-engine": "2.9.0"}
    monkeypatch.setattr(requirements.importlib.metadata, "version", versions.get)
    with pytest.raises(InputError, match="transformer-engine.*>=2.12; 2.9.0 is installed"):
        transformer_engine.TransformerEngine.require(CPU)
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(InputError, match="precision.backend=triton needs the package triton"):
        triton_kernels.Triton.require(CPU)


def test_uninterpreted_kernels_ask_for_a_hopper_gpu():
    code = (
        "import torch\nfrom dstrain.config.errors import InputError\n"
        "from dstrain.precision.backends.triton_kernels import Triton\n"
        "try: Triton.require(torch.device('cpu'))\nexcept InputError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "precision.backend=triton needs an NVIDIA Hopper GPU, not device cpu", run.stderr


def test_versions_compare_by_number():
    assert requirements.numbers("2.13.0+cpu") == (2, 13, 0) and requirements.numbers("2.10rc1") == (2,)
    assert requirements.numbers("2.9") < requirements.numbers("2.12")


# What they compute --------------------------------------------------------------------------------------------


def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """torch.nn.functional.scaled_mm by blocks, with the checks of its source (ScaledBlas.cpp)."""
    (m, k), n, tiles = a.shape, b.shape[1], -(-a.shape[1] // 128)
    assert a.stride(1) == 1 and b.stride(0) == 1 and k % 16 == 0 and a.stride(0) % 16 == 0 and b.stride(1) % 16 == 0
    assert recipe_a == F.ScalingType.BlockWise1x128
    assert scale_a.shape == (m, tiles) and scale_a.stride(0) == 1 and scale_a.stride(1) == m
    if recipe_b == F.ScalingType.BlockWise1x128:
        assert scale_b.shape == (n, tiles) and scale_b.stride(0) == 1 and scale_b.stride(1) == n
    else:
        assert recipe_b == F.ScalingType.BlockWise128x128
        inner = -(-tiles // 4) * 4
        assert scale_b.shape == (inner, -(-n // 128)) and scale_b.stride(0) == 1
        assert scale_b.stride(1) == inner
        scale_b = scale_b.t()[:, :tiles]
    return (wide(Scaled(a, scale_a)) @ wide(Scaled(b.t(), scale_b)).t()).to(output_dtype)


def general_gemm(a, b, out_dtype, layout, out=None, accumulate=False):
    """Transformer Engine's: b aᵀ for TN, with the checks of its source (cublaslt_gemm.cu)."""
    assert layout == "TN" and not (a.blocks and b.blocks)
    for x in (a, b):
        rows, k = x.codes.shape
        assert k % 16 == 0 and x.codes.is_contiguous() and x.scale.is_contiguous() and x.codes.dtype == torch.uint8
        expected = (-(-rows // 128), -(-k // 128)) if x.blocks else (-(-k // 128), rows)
        assert x.scale.shape == (expected[0], -(-expected[1] // 4) * 4)
        assert x.blocks or rows % 8 == 0
    assert a.codes.shape[0] % 8 == 0

    def values(x):
        scale = x.scale if x.blocks else x.scale[:, : x.codes.shape[0]].t()
        codes = x.codes.view(torch.float8_e4m3fn)
        return wide(Scaled(codes, scale[:, : -(-codes.shape[1] // 128)]))

    product = values(b) @ values(a).t()
    if not accumulate:
        return [product.to(out_dtype)]
    out.copy_(out.double() + product)


class DeepGemmSource:
    """The three functions of DeepGEMM, with the checks of its source (csrc/apis/gemm.hpp)."""

    @staticmethod
    def fp8_gemm_nt(a, b, d, c=None, recipe=(1, 128, 128)):
        a, b = Scaled(*a), Scaled(*b)
        assert a.codes.is_contiguous() and b.codes.is_contiguous() and a.codes.shape[1] % 16 == 0
        assert a.scale.shape == (len(a.codes), -(-a.codes.shape[1] // 128))
        assert b.scale.shape[0] == -(-len(b.codes) // recipe[1])
        if recipe == (1, 1, 128):
            assert c is d and d.dtype == torch.float32
            d.copy_(d.double() + wide(a) @ wide(b).t())
        else:
            assert c is None and d.dtype == torch.bfloat16
            d.copy_(wide(a) @ wide(b).t())

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout):
        a, b = Scaled(*a), Scaled(*b)
        assert d.dtype == torch.bfloat16 and layout.dtype == torch.int32 and len(layout) == len(a.codes) == len(d)
        values, weights = wide(a), wide(b)
        for block in range(0, len(layout), 128):  # a block of rows has one expert; the rest of it is filling
            names = layout[block : block + 128]
            expert = names[0].item()
            assert set(names.tolist()) <= {expert, -1}
            if expert >= 0:
                d[block : block + 128] = (values[block : block + 128] @ weights[expert].t()).bfloat16()

    @staticmethod
    def k_grouped_fp8_gemm_nt_contiguous(a, b, d, sizes, sizes_on_device, c=None):
        assert c is d and d.is_contiguous() and sizes == sizes_on_device.tolist()
        assert not any(size % 128 for size in sizes)
        assert a[0].ndim == b[0].ndim == 1
        done = 0
        for expert, size in enumerate(sizes):
            tiles = slice(done // 128, (done + size) // 128)
            left, right = (
                Scaled(codes[done * rows : (done + size) * rows].view(rows, size), scale[:, tiles])
                for (codes, scale), rows in ((a, d.shape[1]), (b, d.shape[2]))
            )
            d[expert] += (wide(left) @ wide(right).t()).float()
            done += size


class Operand(SimpleNamespace):
    """What Transformer Engine's tensor was made of."""


@pytest.fixture(params=["triton", *sorted(OTHERS)])
def chosen(request, monkeypatch):
    """A backend whose library, where it is another's, is replaced by what its source says."""
    name = request.param
    if name == "torch":
        monkeypatch.setattr(F, "scaled_mm", scaled_mm)
        return torch_scaled_mm.TorchScaledMM()
    if name == "transformer_engine":
        module = SimpleNamespace(general_gemm=general_gemm)
        monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpp_extensions", module)
        monkeypatch.setattr(
            transformer_engine.TransformerEngine, "operand",
            lambda self, x: Operand(**dict(zip(("codes", "scale", "blocks"), transformer_engine.layout(x)))),
        )
        return transformer_engine.TransformerEngine()
    if name == "deepgemm":
        monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemmSource)
        return deep_gemm.DeepGemm()
    return triton_kernels.Triton()


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(result, expected, tolerance):
    assert result.shape == expected.shape
    assert not expected.numel() or (result.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("shape", [(33, 144, 200), (128, 136, 512), (8, 16, 48)], ids=str)
def test_dense_products_are_the_float64_products_of_their_operands(chosen, shape):
    m, n, k = shape
    x, (weight, turned), dy = (
        chosen.quantize_rows(random(m, k, seed=0)), chosen.quantize_weight(random(n, k, seed=1)), random(m, n, seed=2)
    )
    close(chosen.matmul(x, weight, torch.bfloat16), wide(x) @ wide(weight).t(), 2.0**-8)
    rows, columns = chosen.quantize_both(dy, None)
    close(chosen.matmul(rows, turned, torch.bfloat16), wide(rows) @ wide(turned).t(), 2.0**-8)
    x_columns = chosen.requantize_columns(x, None)
    out = random(n, k, seed=3)
    expected = out.double() + wide(columns) @ wide(x_columns).t()
    chosen.accumulate(columns, x_columns, out)
    close(out, expected, 1e-5)


# FAULTS B11
@pytest.mark.parametrize("counts", [[128, 130, 65], [0, 1, 0, 127], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("spare", [0, 30])
def test_products_of_experts_are_a_loop_over_experts(chosen, counts, spare):
    """Right values: each expert's rows alone, quantised by the definition. Rows of nobody reach neither result."""
    n, k, experts = 24, 144, len(counts)
    offsets = torch.tensor(counts).cumsum(0).int()
    rows, dy = (random(sum(counts) + spare, size, seed=size) for size in (k, n))
    weights = random(experts, n, k, seed=1)
    x, (weight, _), columns = (
        chosen.quantize_rows(rows), chosen.quantize_weight(weights), chosen.quantize_columns(dy, offsets)
    )
    result = chosen.grouped_matmul(x, weight, offsets, torch.bfloat16)
    parts, values, dense = x.codes.split([*counts, spare]), x.scale.split([*counts, spare]), wide(weight)
    expected = torch.cat([wide(Scaled(c, s)) @ w.t() for c, s, w in zip(parts, values, dense)])
    close(result[: sum(counts)], expected, 2.0**-8)
    out = random(experts, n, k, seed=3)
    expected = out.double()
    chosen.grouped_accumulate(columns, chosen.requantize_columns(x, offsets), offsets, out)
    again = fp8_tiles.dequantize_rows(*x, torch.float32)
    for expert, (p, q) in enumerate(zip(dy.split([*counts, spare]), again.split([*counts, spare]))):
        if expert < experts and len(p):
            left, right = (Scaled(*fp8_tiles.quantize_columns(y)) for y in (p, q))
            expected[expert] += wide(left) @ wide(right).t()
    close(out, expected, 1e-5)


def test_columns_of_experts_in_the_definitions_layout_are_taken_too(chosen):
    offsets = torch.tensor([5, 5, 140], dtype=torch.int32)
    dy, x = random(140, 24, seed=0), random(140, 32, seed=1)
    mine, plain = torch.zeros(3, 24, 32), torch.zeros(3, 24, 32)
    chosen.grouped_accumulate(chosen.quantize_columns(dy, offsets), chosen.quantize_columns(x, offsets), offsets, mine)
    definitions = [Scaled(*fp8_tiles.quantize_columns(y, offsets)) for y in (dy, x)]
    chosen.grouped_accumulate(*definitions, offsets, plain)
    assert torch.equal(mine, plain) and plain[0].any() and not plain[1].any() and plain[2].any()


@pytest.mark.parametrize("keep", ["tiles", "e5m6"])
@pytest.mark.parametrize("counts", [None, [30, 0, 17]], ids=str)
def test_a_linear_on_any_backend_is_the_emulated_one(chosen, counts, keep):
    """Outputs, input gradients and weight gradients, whatever of the input is kept; the same roundings, other sums."""
    offsets = None if counts is None else torch.tensor(counts).cumsum(0).int()
    if counts is not None and keep == "e5m6":
        return  # the input of the Linear after attention has no experts
    x, dy = random(47, 144, seed=0).bfloat16(), random(47, 24, seed=1).bfloat16()
    results = []
    for backend in (Emulated(), chosen):
        weight = torch.nn.Parameter(random(*(() if counts is None else (3,)), 24, 144, seed=2).bfloat16())
        weight.main_grad = torch.zeros(weight.shape)
        inputs = x.clone().requires_grad_()
        out = fp8_linear(inputs, weight, backend, offsets, e5m6=keep == "e5m6")
        out.backward(dy)
        results.append((out.detach(), inputs.grad, weight.main_grad))
    for mine, emulated, tolerance in zip(*results[::-1], (2.0**-7, 2.0**-7, 1e-5)):
        close(mine, emulated.double(), tolerance)


@pytest.mark.parametrize("again", [False, True])
def test_a_norm_and_its_linear_on_any_backend_are_the_emulated_ones(chosen, again):
    x, dy, results = random(47, 144, seed=0).bfloat16(), random(47, 24, seed=1).bfloat16(), []
    for backend in (Emulated(), chosen):
        weight, norm = torch.nn.Parameter(random(24, 144, seed=2).bfloat16()), RMSNorm(144, 1e-6, torch.bfloat16)
        weight.main_grad, norm.weight.data = torch.zeros(weight.shape), 1 + 0.1 * random(144, seed=3)
        inputs = x.clone().requires_grad_()
        (out,) = fp8_normed_linear(inputs, norm, [weight], backend, again)
        out.backward(dy)
        results.append((out.detach(), inputs.grad, weight.main_grad, norm.weight.grad))
    for mine, emulated in zip(*results[::-1], strict=True):
        assert (mine.double() - emulated.double()).norm() <= 3e-3 * emulated.double().norm()


@pytest.mark.parametrize("counts", [None, [30, 0, 17]], ids=str)
def test_an_mlp_on_any_backend_is_the_emulated_one(chosen, counts):
    """With fused kernels between the products; the last bit of an exponential moves a few codes by a step."""
    offsets = None if counts is None else torch.tensor(counts).cumsum(0).int()
    x, dy = random(47, 144, seed=0).bfloat16(), random(47, 144, seed=1).bfloat16()
    factor = None if counts is None else random(47, seed=2).abs()
    results = []
    for backend in (Emulated(), chosen):
        sizes = [(160, 144), (160, 144), (144, 160)]
        weights = [
            torch.nn.Parameter((random(*(() if counts is None else (3,)), *size, seed=seed) * 0.1).bfloat16())
            for seed, size in enumerate(sizes, 3)
        ]
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
        inputs, row = x.clone().requires_grad_(), None if factor is None else factor.clone().requires_grad_()
        out = fp8_ffn(inputs, *weights, backend, row, offsets)
        out.backward(dy)
        results.append([out.detach(), inputs.grad, *(weight.main_grad for weight in weights)] + ([row.grad] if counts else []))
        with torch.no_grad():
            assert torch.equal(fp8_ffn(inputs, *weights, backend, row, offsets), out)
    for mine, emulated in zip(*results[::-1], strict=True):
        assert (mine.double() - emulated.double()).norm() <= 3e-3 * emulated.double().norm()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_quantisers_of_a_backend_are_the_definitions(power_of_two):
    x, backend = adversarial(70, 200, torch.bfloat16), triton_kernels.Triton(power_of_two)
    rows = Scaled(*fp8_tiles.quantize_rows(x, power_of_two))
    columns = Scaled(*fp8_tiles.quantize_columns(x, None, power_of_two))
    assert same(backend.quantize_rows(x), rows) and same(backend.quantize_columns(x, None), columns)
    assert same(backend.quantize_both(x, None), (rows, columns))
    assert same(backend.dequantize_rows(rows, torch.bfloat16), fp8_tiles.dequantize_rows(*rows, torch.bfloat16))
    expected = fp8_tiles.requantize_columns(*rows, None, power_of_two)
    assert same(backend.requantize_columns(rows, None), expected)
    packed = e5m6.quantize_e5m6(x)
    assert same(backend.quantize_e5m6(x), packed)
    assert same(backend.e5m6_to_columns(*packed, 200), e5m6.e5m6_to_columns(*packed, 200, power_of_two))
    assert same(backend.quantize_weight(x)[0], fp8_blocks.quantize_blocks(x, power_of_two))

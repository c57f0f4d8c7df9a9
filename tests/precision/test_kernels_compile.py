"""The Triton kernels compile for sm_90 here, without a GPU, into what they were written for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every kernel's numbers, from a process that does not interpret and has nothing cached."""
    script = Path(__file__).resolve().parents[1] / "compile_sm90.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    for name, numbers in result.items():
        print(f"{name:28} registers {numbers['registers']:3}  shared {numbers['shared']:6}  spilled {numbers['stack']}")
    return result


def test_no_kernel_spills_and_the_control_shows_that_a_spill_is_seen(compiled):
    """The control is the product with 4 warps, whose accumulators are twice a thread's 255 registers."""
    assert compiled.pop("control")["stack"] > 0
    assert len(compiled) == 19
    for name, numbers in compiled.items():
        assert numbers["stack"] == 0 and 0 < numbers["registers"] <= 255, name
        assert numbers["shared"] <= 227 * 1024, f"{name}: more shared memory than a program may have on sm_90"


def test_products_are_e4m3_warp_group_products_fed_by_wide_asynchronous_copies(compiled):
    """A depth of 128 is four instructions of depth 32; a byte-wise copy would mean a lost alignment."""
    for name in ("matmul", "accumulate", "grouped_matmul", "grouped_accumulate"):
        assert compiled[name]["wgmma"] == 4 and compiled[name]["asynchronous"] >= 16, name


def test_memory_bound_kernels_move_16_bytes_at_once(compiled):
    names = "quantize_rows", "quantize_both", "requantize_columns", "quantize_weight", "swiglu", "rms_norm", "permute"
    for name in names:
        assert compiled[name]["wide"] >= 4, name

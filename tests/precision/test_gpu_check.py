"""`tools/gpu_check.py --dry`: every line of the table runs without a GPU, and a kernel that is wrong fails its line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
# What a GPU machine need not have: everything that is neither torch, triton, hydra-core nor what these need.
BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"safetensors", "tokenizers", "datasets", "wandb", "rich", "transformers", "pytest"}:
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=550, env=environment, cwd=ROOT / "tools"
    )


def test_the_dry_run_passes_with_no_other_packages_and_ends_with_one_line_of_json(tmp_path):
    out = tmp_path / "table.md"
    start = f"{BLOCKED}\nsys.argv = ['gpu_check.py', '--dry', 'out={out}']\n"
    result = run(start + "import gpu_check\nsys.exit(gpu_check.main())")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["dry"] and not summary["failed"] and "FAILED" not in result.stdout
    # left out: the backends of others, at every product, and nothing else
    assert len(summary["left_out"]) == 9 and all("precision.backend=" in line for line in summary["left_out"])
    sections = {line.split("|")[1].strip() for line in result.stdout.splitlines() if line.startswith("| ")}
    assert sections == {"section", "right", "products", "bandwidth", "training"}
    assert {"right product of experts", "training bf16", "training fp8"} <= set(summary["numbers"])
    text = out.read_text()
    assert text.count("```") == 2
    for line in ("| right | SwiGLU | equal", "BF16 grouped_mm | ran |", "| bandwidth | SwiGLU backward | ran |"):
        assert line in text


def test_a_wrong_kernel_fails_its_line_and_the_rest_goes_on():
    result = run(
        "import sys\nsys.argv = ['gpu_check.py', '--dry']\nimport gpu_check as check\n"
        "right = check.tiles.quantize_rows\n"
        "def wrong(x, power=True):\n    codes, scale = right(x, power)\n    return codes, scale * 2\n"
        "def broken(*a, **k): raise RuntimeError('no such\\nkernel')\n"
        "check.tiles.quantize_rows, check.permute.unpermute = wrong, broken  # gpu_right sees the same modules\n"
        "check.products = check.grouped_products = check.bandwidth = check.training = lambda report: None\n"
        "sys.exit(check.main())"
    )
    assert result.returncode == 1, result.stderr[-2000:]
    summary = json.loads(result.stdout.splitlines()[-1])
    assert {name.split(",")[0] for name in summary["failed"]} == {"right 1x128 tiles", "right unpermute"}
    assert "| right | unpermute | FAILED: RuntimeError: no such kernel |" in result.stdout


def test_without_a_gpu_it_says_so():
    result = run(
        "import sys, torch\ntorch.cuda.is_available = lambda: False\n"
        "sys.argv = ['gpu_check.py']\nimport gpu_check\ngpu_check.main()"
    )
    assert result.returncode == 1 and "no NVIDIA GPU" in result.stderr and "--dry" in result.stderr

"""tools/fp8_parity.py: its gaps from losses made up here, and what its control does to E4M3."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import fp8_parity as parity  # noqa: E402


def test_gaps_are_of_the_last_steps_and_of_finished_runs():
    options = parity.DEFAULTS | {"steps": "4", "last": "2"}
    losses = {"bf16": [9.0, 8.0, 4.0, 4.0], "bf16_micro": [1.0, 1.0, 4.0, 4.004], "fp8": [9.0, 8.0, 4.0, 3.96],
              "control": [9.0, 8.0, 4.0]}
    summary = parity.compare(losses, options)
    assert summary["gap_percent"] == pytest.approx({"bf16": 0, "bf16_micro": 0.05, "fp8": 0.5})
    assert summary["passed"] == {"bf16_micro": True, "fp8": False} and summary["done"]["control"] == 3
    text = parity.table(losses, summary, options)
    assert "| fp8 | 4 | 3.98000 | 0.500 % | at most 0.25 % |" in text and "| control | 3 |  |  | above 0.25 % |" in text
    assert parity.curve(losses).count("<polyline") == 4 + 3


def test_the_control_clears_the_last_bit_of_every_code():
    """In a process of its own, as the tool does: the number format stays changed there."""
    code = f"""
import sys; sys.path.insert(0, {str(TOOLS)!r})
import torch
from dstrain.precision import fp8_blocks, fp8_tiles
import fp8_parity
exact = fp8_tiles.to_e4m3
fp8_parity.take_a_mantissa_bit()
codes = torch.arange(256).to(torch.uint8)
codes = codes[(codes & 127) != 127]  # but the NaNs
values = codes.view(torch.float8_e4m3fn).float()
values = torch.cat((values, torch.randn(1000) * 100, torch.randn(1000) / 100)).clamp(-448, 448)
one = torch.ones(())
for to_e4m3 in (fp8_tiles.to_e4m3, fp8_blocks.to_e4m3):
    assert torch.equal(to_e4m3(values, one).view(torch.uint8), exact(values, one).view(torch.uint8) & 254)
assert fp8_tiles.to_e4m3(values, one * torch.nan).isnan().all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

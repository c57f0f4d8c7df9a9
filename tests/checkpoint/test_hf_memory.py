"""Import streams: its memory does not grow with the model.

The bound asked for is the model's own size and twice its largest shard. Streaming needs much less: two shards stay
mapped (a weight and its scales may lie apart) and one tensor is in hand. Measured is the growth of the process's peak
memory, mapped pages included, over what it needed for a tiny import.
"""

import subprocess
import sys

from hf_folders import export, write_checkpoint
from oracle import tiny_config

MEASURE = r"""
import re, sys
from dstrain.checkpoint.hf_import import import_folder
from dstrain.config.schema import ImportConfig
# Not getrusage: its peak is inherited from the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
import_folder(ImportConfig(sys.argv[1], sys.argv[2]))
before = peak()
import_folder(ImportConfig(sys.argv[3], sys.argv[4]))
print(peak() - before)
"""


def test_import_needs_less_than_three_shards_of_a_model_of_eleven(tmp_path):
    config = tiny_config(hidden_size=512, moe_intermediate_size=512, n_routed_experts=20, num_nextn_predict_layers=1,
                         mtp_depth_weights=None)
    small = export(write_checkpoint(tmp_path / "run-small", tiny_config()), tmp_path / "small")
    folder = export(write_checkpoint(tmp_path / "run", config), tmp_path / "hf", shard_size="20MB")
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) > 10 and sum(sizes) > 200e6
    paths = [str(path) for path in (small, tmp_path / "a", folder, tmp_path / "b")]
    measured = subprocess.run([sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True)
    assert int(measured.stdout) < 3 * max(sizes)

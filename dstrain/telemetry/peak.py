"""The peak rate of the device that MFU is measured against."""

import time

import torch

# Dense BF16 tensor-core TFLOPS from the vendor's data sheets.
BF16_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "H800": 989, "B200": 2250, "A100": 312, "L40S": 362}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """TFLOPS and where the figure comes from: the data sheet, or a large product measured on the spot."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, tflops in BF16_TFLOPS.items():
            if known in name:
                return tflops, f"data sheet of {known}"
    return measure_gemm_tflops(device, dtype), "a large matrix product measured here"


def measure_gemm_tflops(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 7) -> float:
    """Rate of the fastest of some size³ matrix products: what disturbs the others is not the device."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    b = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds) / 1e12

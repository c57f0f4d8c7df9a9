"""Set-up of every test process: nothing goes to W&B, Triton kernels run in the interpreter with corrected FP8 casts.

Triton decides when it and a kernel are first imported, so this comes before any test is collected; processes that
tests start do not inherit it. `dstrain.precision.kernels.interpreter` says what is wrong with the casts.
"""

import os

os.environ["WANDB_MODE"] = "disabled"  # no test writes into somebody's account unless it says so
os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton.experimental.gluon  # noqa: F401  (imported by the first launch, it insists on the variable)

    from dstrain.precision.kernels import blocks, e5m6, gemm, grouped_gemm, permute, rms_norm, swiglu  # noqa: F401
    from dstrain.precision.kernels.interpreter import correct_casts

    correct_casts()
except ModuleNotFoundError as error:  # no Triton on this platform: the tests of its kernels are left out
    if error.name != "triton":
        raise
del os.environ["TRITON_INTERPRET"]

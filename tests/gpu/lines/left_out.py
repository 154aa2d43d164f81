"""Lines that nothing runs yet, each with its reason."""

from tests.gpu.check import REGISTRY

REGISTRY.leave_out(
    "clients",
    "`make clients` makes an environment of its own from a package registry, and its programs run on CPU ranks",
)
REGISTRY.leave_out("rocm", "no machine with ROCm was there; `make gpu` would run the other lines on it as on CUDA")
REGISTRY.leave_out("xpu", "no machine with an XPU was there; `make gpu DEVICE=xpu` would run the other lines")

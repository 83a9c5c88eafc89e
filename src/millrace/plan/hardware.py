"""GPUs that a plan can be made for: memory, peak rates and links, from the maker's documents.

Peaks are dense bfloat16 with float32 accumulation. Links are per direction; those between hosts are
assumptions.
"""

from dataclasses import dataclass

from millrace.core.errors import ConfigError, suggestion

GIB = 2**30
HOST_GPUS = 8  # per host; ranks and engines beyond it use the network


@dataclass(frozen=True)
class Gpu:
    memory_gb: float
    tflops: float
    gb_per_s: float  # of its memory
    link: float  # GB/s to a GPU of the same host
    network: float  # GB/s to a GPU of another host
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
GPUS = {
    "a100": Gpu(80, 312, 2039, 300, 25, f"{_NVIDIA}/a100/ (SXM, 80 GB)"),
    "a100-40gb": Gpu(40, 312, 1555, 300, 25, f"{_NVIDIA}/a100/ (SXM, 40 GB)"),
    "h100": Gpu(80, 989, 3350, 450, 50, f"{_NVIDIA}/h100/ (SXM)"),
    "h100-pcie": Gpu(80, 756, 2000, 64, 50, f"{_NVIDIA}/h100/ (PCIe)"),
    "h200": Gpu(141, 989, 4800, 450, 50, f"{_NVIDIA}/h200/ (SXM)"),
    "b200": Gpu(180, 2250, 8000, 900, 50, f"{_NVIDIA}/dgx-b200/ (an eighth of a DGX B200)"),
    "l40s": Gpu(48, 362, 864, 32, 25, f"{_NVIDIA}/l40s/"),
    "l4": Gpu(24, 121, 300, 32, 12.5, f"{_NVIDIA}/l4/"),
    "rtx3090": Gpu(24, 71, 936, 16, 1.25, "NVIDIA Ampere GA102 GPU Architecture, 2021"),
    "rtx4090": Gpu(24, 165, 1008, 32, 1.25, "NVIDIA Ada GPU Architecture, 2023"),
    "rtx5090": Gpu(32, 209, 1792, 64, 1.25, "NVIDIA RTX Blackwell GPU Architecture, 2025"),
}


def gpu_named(name: str) -> Gpu:
    if (found := GPUS.get(name.lower())) is None:
        hint = suggestion(name.lower(), GPUS, otherwise="there are")
        raise ConfigError(f"--gpu {name!r} is not in the table; {hint}")
    return found

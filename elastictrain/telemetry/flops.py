"""The dense peaks of devices, which the utilisation of a model's FLOPs (MFU) is measured against.

Source: the vendors' data sheets. Figures are dense (a data sheet's "with sparsity" halved), with accumulation in float32, at
the boost clock of the stock board. fp32 is without TF32, which torch leaves off for matrix products. torch sees an MI250X
as two devices, so the figure is half a board's.

- NVIDIA: data sheets of A100, H100, H200, L4, L40S, A10, T4, V100; HGX and GB200 brief for B200; the Ampere GA102 and Ada
  architecture white papers for the GeForce boards.
- AMD: data sheets of MI250X and MI300X (matrix cores).
"""

import re
from collections.abc import Mapping
from typing import Literal

Precision = Literal["fp32", "bf16", "fp8"]  # fp8 counts against the peak of bf16: much of a model stays in it

# bf16 and fp32 in 10^12 operations per second; None: the hardware has no such arithmetic. The device's name must contain all
# words of a key; the key with the most words wins: "H100 PCIe" before "H100".
PEAKS: Mapping[tuple[str, ...], tuple[float | None, float]] = {
    ("A100",): (312.0, 19.5),
    ("H100",): (989.4, 66.9),
    ("H100", "PCIe"): (756.0, 51.2),
    ("H100", "NVL"): (835.5, 60.0),
    ("H200",): (989.4, 66.9),
    ("H200", "NVL"): (835.5, 60.0),
    ("GH200",): (989.4, 66.9),
    ("B200",): (2250.0, 75.0),
    ("GB200",): (2500.0, 80.0),
    ("L4",): (121.0, 30.3),
    ("L40S",): (362.0, 91.6),
    ("A10",): (125.0, 31.2),
    ("V100",): (None, 15.7),
    ("V100", "PCIE"): (None, 14.0),
    ("T4",): (None, 8.1),
    ("RTX", "4090"): (165.2, 82.6),
    ("RTX", "3090"): (71.0, 35.6),
    ("MI250X",): (191.5, 47.9),
    ("MI300X",): (1307.4, 163.4),
}


def peak_flops(device_name: str, *, precision: Precision) -> float | None:
    """Dense peak in operations per second of a device by its name; None if it is not in the table."""
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9]+", device_name)}
    fitting = [key for key in PEAKS if all(word.lower() in words for word in key)]
    # A MIG slice has the name of the whole device.
    if not fitting or "mig" in words:
        return None
    bf16, fp32 = PEAKS[max(fitting, key=len)]
    tera = fp32 if precision == "fp32" else bf16
    return None if tera is None else tera * 1e12

"""Figures as a person reads them."""

import math

from elastictrain.telemetry.reading import Reading


def duration_text(seconds: float) -> str:
    """`850 ms`, `42 s`, `3 min 07 s`, `5 h 12 min`, `2 d 03 h`: the two largest units."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def count_text(count: float) -> str:
    """Three digits and a power of a thousand: `999`, `12.3k`, `1.5M`, `2.0G`."""
    if not math.isfinite(count):
        return "?"
    if abs(count) < 999.5:
        return f"{count:.0f}"
    scaled = count
    for suffix in ("k", "M", "G", "T"):
        scaled /= 1000
        if abs(scaled) < 999.5 or suffix == "T":
            break
    # 99.95 would be rounded to 100.0.
    return f"{scaled:.1f}{suffix}" if abs(scaled) < 99.95 else f"{scaled:.0f}{suffix}"


def reading_text(reading: Reading, *, eta_s: float | None) -> str:
    """The figures of a logged step in one line."""
    parts = [
        f"loss {reading.loss:.4f}",
        f"lr {reading.lr:.2e}",
        f"grad norm {reading.grad_norm:.3f}",
        f"{count_text(reading.tokens_per_s)} tokens/s",
    ]
    if reading.mfu is not None:
        parts.append(f"MFU {reading.mfu:.1%}")
    if reading.skipped:
        parts.append(f"{reading.skipped} skipped")
    if eta_s:
        parts.append(f"{duration_text(eta_s)} to go")
    return ", ".join(parts)


def step_line(reading: Reading, *, total_steps: int, eta_s: float | None) -> str:
    """The line of a logged step: `step  40/300: loss 3.2101, ...`; steps are aligned."""
    return f"step {reading.step:>{len(str(total_steps))}}/{total_steps}: {reading_text(reading, eta_s=eta_s)}"

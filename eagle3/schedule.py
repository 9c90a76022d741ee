"""The learning rate as a pure function of the optimizer step: linear warm-up, then a cosine to the floor.

Nothing is stored or counted here, so gradient accumulation, a resume or a changed number of processes cannot
move the curve.
"""

from math import cos, pi


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Number of warm-up steps: at least 1 (the peak itself) and, where there is room, less than all."""
    return min(max(1, round(warmup_ratio * total_steps)), max(1, total_steps - 1))


def lr_at(step: int, *, peak: float, total_steps: int, warmup_ratio: float, floor_ratio: float) -> float:
    """Learning rate of the 0-based optimizer step `step`.

    It rises in equal parts to `peak`, which is reached exactly at the last warm-up step, then follows half a
    cosine and is `floor_ratio * peak` exactly at step `total_steps - 1`; later steps stay there. A run of one
    step takes the peak. Raises ValueError for a value outside its range.
    """
    _check(step, peak, total_steps, warmup_ratio, floor_ratio)
    summit = warmup_steps(total_steps, warmup_ratio) - 1
    if step <= summit:
        return peak * (step + 1) / (summit + 1)
    progress = min(1.0, (step - summit) / max(1, total_steps - 1 - summit))
    return peak * (floor_ratio + (1.0 - floor_ratio) * 0.5 * (1.0 + cos(pi * progress)))


def _check(step: int, peak: float, total_steps: int, warmup_ratio: float, floor_ratio: float) -> None:
    if step < 0:
        raise ValueError(f"step {step} is negative: optimizer steps count from 0")
    if total_steps < 1:
        raise ValueError(f"total_steps {total_steps} is less than 1: the run has no optimizer step")
    if not peak > 0.0:
        raise ValueError(f"learning rate {peak} is not positive: set optimizer.lr above 0")
    if not 0.0 <= warmup_ratio < 1.0:
        raise ValueError(f"warmup_ratio {warmup_ratio} is outside [0, 1): it is a share of all steps")
    if not 0.0 <= floor_ratio <= 1.0:
        raise ValueError(f"floor_ratio {floor_ratio} is outside [0, 1]: it is a share of the peak")

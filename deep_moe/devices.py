"""The forms in which callers name a device."""

from __future__ import annotations

import torch


def named_device(device: torch.device | str | int) -> torch.device:
    """A device by its name or number; TypeError or ValueError for what names none.

    >>> named_device("cpu")
    device(type='cpu')
    """
    try:
        return torch.device(device)
    except TypeError as error:
        raise TypeError(f"device must be a CPU or a CUDA device; got {device!r}") from error
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device must be a CPU or a CUDA device; got {device!r}") from error

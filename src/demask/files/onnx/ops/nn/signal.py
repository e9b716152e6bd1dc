"""ONNX ops on signals: Fourier transforms and windows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from demask.files.onnx.op_functions import Int, Ops
from demask.files.onnx.ops.math.cast import dtype_of

OPS = Ops()


@OPS("DFT")
def fourier(
    x: Tensor, dft_length: Int = None, axis: Int = None, *, inverse: int = 0, onesided: int = 0, version: int
) -> Tensor:
    """The Fourier transform along an axis; the last axis has the real and imaginary parts, or only
    the real part."""
    axis = (1 if version < 20 else -2) if axis is None else axis
    axis %= x.ndim
    signal = _as_complex(x)
    if not inverse:
        return _as_real_parts(_fourier(signal, dft_length, axis, bool(onesided)), x.dtype)
    if onesided:
        return torch.fft.irfft(signal, dft_length, axis).unsqueeze(-1).to(x.dtype)
    return _as_real_parts(torch.fft.ifft(signal, dft_length, axis), x.dtype)


def _fourier(signal: Tensor, length: Int, axis: int, onesided: bool) -> Tensor:
    if onesided and not signal.is_complex():
        return torch.fft.rfft(signal, length, axis)
    spectrum = torch.fft.fft(signal, length, axis)
    return spectrum.narrow(axis, 0, spectrum.shape[axis] // 2 + 1) if onesided else spectrum


def _as_complex(x: Tensor) -> Tensor:
    """The signal whose parts are on the last axis: real if there is one part, else complex."""
    x = x if x.dtype.itemsize > 2 else x.to(torch.float32)
    return x.squeeze(-1) if x.shape[-1] == 1 else torch.complex(x[..., 0], x[..., 1])


def _as_real_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    parts = torch.view_as_real(x.resolve_conj())
    return parts if parts.dtype == dtype else parts.to(dtype)


@OPS("STFT")
def short_time_fourier(
    x: Tensor, frame_step: Int, window: Tensor | None = None, frame_length: Int = None, *, onesided: int = 1
) -> Tensor:
    """Fourier transforms of frames of a signal, [batch, frames, frequencies, 2]."""
    signal = _as_complex(x if x.ndim == 3 else x.unsqueeze(-1))
    if frame_length is None:
        frame_length = signal.shape[1] if window is None else window.shape[0]
    frames = signal.unfold(1, frame_length, frame_step)
    if window is not None:
        frames = frames * (window if window.dtype.itemsize > 2 else window.to(torch.float32))
    return _as_real_parts(_fourier(frames, None, 2, bool(onesided)), x.dtype)


def _window_op(*weights: float) -> Any:
    """A window op: a sum of cosines with these weights, computed in float64."""

    def call(size: Int, *, periodic: int = 1, output_datatype: int = 1, device: torch.device) -> Tensor:
        positions = torch.arange(size, dtype=torch.float64, device=device)
        angles = positions * (2 * math.pi) / (size if periodic else size - 1)
        values = torch.stack([w * torch.cos(k * angles) for k, w in enumerate(weights)]).sum(0)
        return values.to(dtype_of(output_datatype))

    return call


OPS("BlackmanWindow")(_window_op(0.42, -0.5, 0.08))
OPS("HammingWindow")(_window_op(25 / 46, -21 / 46))
OPS("HannWindow")(_window_op(0.5, -0.5))

"""From seconds to tokens/s, samples/s and MFU, and the formula of the MFU as text. Pure numbers: no clock, no device.

MFU is model FLOPs over what all devices can do at most (`flops.py`): causal attention half, nothing recomputed, the head
counted, the embedding lookup not; so it is the same count for every layout. Chowdhery et al. 2022, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmeg.arch import Arch
from jaxmeg.flops import attention_flops_per_token, matmul_flops_per_token, mfu, train_flops_per_token, window
from jaxmeg.hardware import peak_tflops
from jaxmeg.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one update does, and on what."""

    arch: Arch | None
    """None for a module of the user's, whose tokens and FLOPs are not known: its speed is samples/s alone."""
    seq_len: int
    rows: int
    """Rows of an update, over all devices."""
    num_devices: int
    peak: float | None
    """Dense bf16 TFLOP/s of one device; None where it is not known, and then there is no MFU."""

    def rates(self, seconds: float) -> dict[str, float]:
        """samples_per_s, tokens_per_s and mfu (a fraction), as far as they are known, of an update that took `seconds`.

        Every token of a row counts, trained or not: the device computes all of them.
        """
        rates = {"samples_per_s": self.rows / max(seconds, 1e-9)}
        if self.arch is not None:
            rates["tokens_per_s"] = rates["samples_per_s"] * self.seq_len
            if self.peak is not None:
                rates["mfu"] = mfu(self.arch, self.seq_len, rates["tokens_per_s"], self.num_devices, self.peak)
        return rates

    def formula(self) -> str:
        """How tokens/s become MFU, with this run's numbers, in one line."""
        if self.arch is None:
            return "no MFU: the FLOPs of a module of your own are not counted"
        matmul, attention = matmul_flops_per_token(self.arch), attention_flops_per_token(self.arch, self.seq_len)
        count = f"{train_flops_per_token(self.arch, self.seq_len):,} FLOPs a token"
        of = (f"{matmul:,} of weight matrices + {attention:,} of attention (causal: half{window(self.arch)}); forward + backward, "
              "head counted, lookup not, no recompute")
        if self.peak is None:
            return f"no MFU: the peak of this device is not known; {count} = {of}"
        return f"MFU = tokens/s x {count} / ({self.num_devices} x {self.peak:g} TFLOP/s, dense bf16); {of}"


def speed_of(setup: Setup) -> Speed:
    """The run's sizes; the peak is looked up by the name of the first device."""
    devices = setup.mesh.devices
    return Speed(arch=None if setup.own else setup.resolved.arch, seq_len=setup.config.data.seq_len, rows=setup.config.data.global_batch,
                 num_devices=devices.size, peak=peak_tflops(devices.flat[0].device_kind))

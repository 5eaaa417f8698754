# SPDX-License-Identifier: Apache-2.0
"""Assumptions about GPUs other than a GB10: the SM120 cards. Nothing here was measured by this project.

SMs, clocks, L2 and DRAM rates are as sold. A saturating read is assumed to reach 85 % (as on a GB10) to 95 % of DRAM's
rate. GeForce cards run bf16 MMAs at half the rate of an RTX PRO. Under full load block-scaled MMAs
sustain three quarters of their rate at the boost clock: gn-kernels measured 660 TFLOPS on an RTX 5090 and 742 on an RTX
PRO 6000.
"""

from __future__ import annotations

import dataclasses

from . import gb10


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU's limits; pairs are fast and slow.

    ``dram`` is GB/s, ``bf16`` FLOP per clock and SM, ``sustained`` the share of the block-scaled MMA rate at
    ``gigahertz``, ``gigabytes`` its memory.
    """

    name: str
    multiprocessors: int
    gigahertz: float
    l2_megabytes: float
    gigabytes: int
    dram: tuple[float, float]
    bf16: tuple[float, float]
    sustained: tuple[float, float] = (1.0, 0.75)

    @property
    def cycles(self) -> float:
        """Clock cycles per microsecond, summed over the multiprocessors."""
        return 1e3 * self.gigahertz * self.multiprocessors

    @property
    def l2_bytes(self) -> float:
        """Bytes of L2 that hold tensors."""
        return 1e6 * self.l2_megabytes * gb10.L2_USABLE


def _card(name: str, sms: int, gigahertz: float, l2: float, gigabytes: int, sold: float, bf16: float) -> Device:
    return Device(name, sms, gigahertz, l2, gigabytes, (0.95 * sold, 0.85 * sold), (bf16, bf16))


GB10 = Device(
    "GB10",
    gb10.MULTIPROCESSORS,
    gb10.GIGAHERTZ,
    gb10.L2_MEGABYTES,
    128,
    (gb10.FAST.dram_gb_per_second, gb10.SLOW.dram_gb_per_second),
    (gb10.FAST.bf16_flops_per_cycle, gb10.SLOW.bf16_flops_per_cycle),
    (1.0, 1.0),
)
DEVICES = {
    device.name: device
    for device in (
        GB10,
        _card("RTX 5070 Ti", 70, 2.452, 48, 16, 896, 512),
        _card("RTX 5080", 84, 2.617, 64, 16, 960, 512),
        _card("RTX 5090", 170, 2.407, 96, 32, 1792, 512),
        _card("RTX PRO 6000", 188, 2.617, 128, 96, 1792, 1024),
    )
}

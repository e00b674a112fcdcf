"""What an SM100 kernel is built from."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MegaMoEConfig, RoleRegisters


@dataclass(frozen=True)
class Sm100Config(MegaMoEConfig):
    """store_block_m: tokens that an epilogue warpgroup stores at once. num_tmem_stages:
    accumulators. num_tmem_columns: of tensor memory, that a CTA allocates. num_decode_warps: that
    decode weights; 0 where nothing is decoded. num_decode_registers: of each of their threads."""

    store_block_m: int
    num_tmem_stages: int
    num_tmem_columns: int
    num_decode_warps: int
    num_decode_registers: int

    @property
    def role_registers(self) -> tuple[RoleRegisters, ...]:
        dispatch, others, epilogue = super().role_registers
        if not self.num_decode_warps:
            return dispatch, others, epilogue
        decoders = RoleRegisters("decoding", self.num_decode_warps, self.num_decode_registers)
        num_loaders = others.num_warps - decoders.num_warps
        return dispatch, others._replace(num_warps=num_loaders), decoders, epilogue

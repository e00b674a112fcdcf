"""The paths that a command can take, and which options go with which."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from deep_moe.trial import paths as trial_paths


class LayerPath(str, Enum):
    """Which kernels compute the layer."""

    fused_path = "fused"
    split_path = "split"
    throughput_path = "throughput"


def check_split_path(path: LayerPath, shared_experts: int) -> None:
    """Raise for what no path but the fused one does."""
    if shared_experts:
        raise typer.BadParameter(
            f"--shared-experts must be 0 with --path {path.value}: no dispatch brings a rank its "
            f"own tokens; got {shared_experts}"
        )


def choose_path(
    path: LayerPath,
    *,
    domains: int = 1,
    chunks: int = 1,
    exact_sizes: bool = False,
    recv_rows: int | None = None,
    accumulate: bool = False,
    shared_experts: int = 0,
) -> trial_paths.LayerPath:
    """What runs the layer, or BadParameter for options that do not go together."""
    from deep_moe.trial import paths

    is_fused = path is LayerPath.fused_path
    if not is_fused:
        check_split_path(path, shared_experts)
    if not is_fused and domains > 1:
        raise typer.BadParameter(
            f"--domains must be 1 with --path {path.value}, whose ranks reach each other's memory; "
            f"got {domains}"
        )
    if recv_rows is not None and path is not LayerPath.throughput_path:
        raise typer.BadParameter(
            "--recv-rows needs --path throughput: the other paths have a row for every token that "
            f"may come; got --path {path.value}"
        )
    if domains == 1 and (chunks > 1 or exact_sizes):
        raise typer.BadParameter("--chunks and --exact-sizes need --domains of 2 or more; got 1")
    if not is_fused and accumulate:
        raise typer.BadParameter("--accumulate needs --path fused: no other combine adds to y")
    if domains > 1 and accumulate:
        raise typer.BadParameter("--accumulate needs --domains of 1")
    if domains > 1:
        return paths.TwoLevelPath(domains, chunks, exact_sizes)
    if path is LayerPath.split_path:
        return paths.LowLatencyPath()
    if path is LayerPath.throughput_path:
        return paths.ThroughputPath(recv_rows)
    return paths.FusedPath()

